// SPDX-License-Identifier: Apache-2.0
// Stands in for Nsight: NVTX loads the library named by NVTX_INJECTION64_PATH, and calls it at the start and the end of
// each range. Writes one line per call to the file named by NVTX_LISTENER.

#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>

namespace {

FILE* output = nullptr;

int push(const char* name) {
  std::fprintf(output, "push %s\n", name);
  return 0;
}

int pop() {
  std::fprintf(output, "pop\n");
  return 0;
}

}  // namespace

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
  const char* path = std::getenv("NVTX_LISTENER");
  if (path == nullptr || (output = std::fopen(path, "a")) == nullptr) return 0;
  std::setvbuf(output, nullptr, _IOLBF, BUFSIZ);
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size) == 0) return 0;
  if (size <= NVTX_CBID_CORE_RangePop) return 0;
  *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(&push);
  *table[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(&pop);
  return 1;
}
