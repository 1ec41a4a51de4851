# SPDX-License-Identifier: Apache-2.0
"""Puts plans into force on running models: offload() and detach(), cuts in use, pricing them
again.
"""
