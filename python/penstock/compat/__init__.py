# SPDX-License-Identifier: Apache-2.0
"""Access to torch's private names: one module for each part of torch; no other module uses them.

A private name may be missing in the next torch. Each module therefore lists the names that it uses
and looks them up when it is imported. A module whose torch lacks one cannot be imported: it raises
`MissingTorchNameError`, which gives the name, the version of torch, and the features that work
without it. The modules are separate, so that a missing Dynamo name disables the cut and not the
loader.

| module | access to | needed by |
| --- | --- | --- |
| `iterators` | the iterators and workers of `torch.utils.data` | the `DataLoader` |
| `storages` | shared storages, versions of tensors, threads' names | the `DataLoader` |
| `operators` | operators and their schemas, dispatch modes, nests of tensors | the cut |
| `fake_tensors` | fake tensors, symbolic sizes | the cut |
| `modules` | how a module is called, TorchScript's switches | the cut |
| `dynamo` | Dynamo and Inductor | the cut of models that Dynamo captures |
"""
