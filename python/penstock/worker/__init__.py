# SPDX-License-Identifier: Apache-2.0
"""The code of data workers: fetching, seeding and collating batches, starting, and answering
questions.
"""
