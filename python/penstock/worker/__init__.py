# SPDX-License-Identifier: Apache-2.0
"""What runs in a data worker: fetching, seeding and collating a batch. Also how workers start and
answer questions.
"""
