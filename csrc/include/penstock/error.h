// SPDX-License-Identifier: Apache-2.0
#pragma once
// The exception that this library's calls throw.

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>

#include "penstock/export.h"

namespace penstock {

// The kind of failure, and the exception that the Python package raises for it.
enum class ErrorKind : uint8_t {
  kValue,        // an argument, a batch or a state is invalid: ValueError
  kUnsupported,  // this build or this machine does not support the operation: UnsupportedError
  kTimeout,      // a deadline passed: TimeoutError, and RuntimeError for a batch
  kClosed,       // the other process is gone: ClosedError
  kMemory,       // the system is out of memory or descriptors: SharedMemoryError, torch.OutOfMemoryError
  kDataset,      // the dataset, its collate_fn or its transform threw: the dataset's exception
  kWorker,       // a worker process was lost, or it cannot run the job: RuntimeError
  kFailed,       // any other failure: PenstockError
};

// The message states what failed, what was seen, what was expected and what to do. Where the Python package has the
// same error, the text is the same.
//
//   try {
//     for (const penstock::Batch& batch : loader) train(batch);
//   } catch (const penstock::Error& error) {
//     if (error.kind() != penstock::ErrorKind::kDataset) throw;
//     std::cerr << error.what() << "\n";  // which worker, which sample, and the text of the dataset's exception
//   }
class PENSTOCK_API Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text, std::exception_ptr cause = nullptr);
  Error(const Error&) noexcept;
  Error& operator=(const Error&) noexcept;
  ~Error() override;

  ErrorKind kind() const noexcept { return kind_; }

  // The exception that a dataset threw in a thread of this process. Null for errors reported by other processes.
  const std::exception_ptr& cause() const noexcept { return cause_; }

 private:
  ErrorKind kind_;
  std::exception_ptr cause_;
};

}  // namespace penstock
