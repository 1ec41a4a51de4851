# SPDX-License-Identifier: Apache-2.0
"""Access to torch's nests of tensors: `torch.utils._pytree`, which has no public name."""

from __future__ import annotations

from penstock.compat.require import require

require(
    "trees",
    (
        "torch.utils._pytree.TreeSpec",
        "torch.utils._pytree.tree_flatten",
        "torch.utils._pytree.tree_flatten_with_path",
        "torch.utils._pytree.tree_leaves",
        "torch.utils._pytree.tree_map",
        "torch.utils._pytree.tree_map_only",
        "torch.utils._pytree.tree_unflatten",
    ),
    needed_by="penstock.offload",
    without="penstock.DataLoader works without it.",
)

from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten
