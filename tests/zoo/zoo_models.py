# SPDX-License-Identifier: Apache-2.0
"""The zoo: models in common styles, each with the operations that a cut of it moves today."""

from __future__ import annotations

import dataclasses

from cut_models import CASES, Case
from zoo_augmentation import AUGMENTATION
from zoo_calls import CALLS
from zoo_control_flow import CONTROL_FLOW
from zoo_features import FEATURES
from zoo_language import LANGUAGE
from zoo_lengths import LENGTHS
from zoo_sound import SOUND
from zoo_vision import VISION
from zoo_wrappings import WRAPPINGS

STYLES = {
    "resnet": "mean/std buffers, resize in the model",
    "in_place": "in-place and view chain",
    "wide_and_deep": "tables: buckets, one-hot, crosses",
    "log_mel": "short-time Fourier transform",
    "transformer": "tokens with masks",
    "dropout_on_input": "dropout on the input",
    "batch_norm_on_input": "batch norm on the input",
    "side_branch": "dict in, dict out, splits",
}

ZOO: list[Case] = [
    *(dataclasses.replace(case, style=STYLES[case.name]) for case in CASES),
    *CONTROL_FLOW,
    *CALLS,
    *FEATURES,
    *LENGTHS,
    *AUGMENTATION,
    *WRAPPINGS,
    *VISION,
    *SOUND,
    *LANGUAGE,
]
