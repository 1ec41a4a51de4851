# SPDX-License-Identifier: Apache-2.0
"""The code of a data worker: fetching, seeding and collating a batch. Also how workers start and
answer questions.
"""
