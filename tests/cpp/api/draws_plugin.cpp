// SPDX-License-Identifier: Apache-2.0
// A plug-in for the tests: the datasets of draw_datasets.h, and some that fail.

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DefaultDtype.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>

#include "draw_datasets.h"

namespace {

[[noreturn]] void end_process(const std::string& how) {
  std::cerr << "about to end: " << how << std::endl;
  const rlimit no_dump{};
  ::setrlimit(RLIMIT_CORE, &no_dump);
  if (how == "exit") std::_Exit(5);
  if (how == "segfault") ::raise(SIGSEGV);
  if (how == "kill") ::raise(SIGKILL);
  std::abort();
}

}  // namespace

PENSTOCK_DATASET(draw, [](const penstock::Value& arguments) {
  const penstock::Value* delay_ms = arguments.find("delay_ms");
  return Draw(arguments["size"].integer(), delay_ms == nullptr ? 0 : delay_ms->integer());
})
PENSTOCK_DATASET(draw_stream, [](const penstock::Value& arguments) { return DrawStream(arguments["size"].integer()); })
// Counts the samples that it has made, in the place of their indices.
PENSTOCK_DATASET(counting, [](const penstock::Value& arguments) {
  return penstock::make_dataset(arguments["size"].integer(), [count = int64_t{0}](int64_t) mutable {
    return std::tuple(count++, at::zeros({2}), at::zeros({2}));
  });
})
// Each sample is its index and a picture of 12 KiB, as cpp_loader.py's.
PENSTOCK_DATASET(pictures, [](const penstock::Value& arguments) {
  return penstock::make_dataset(arguments["size"].integer(), [](int64_t index) {
    return std::tuple(index, at::arange(3 * 64 * 64).add(index).to(at::kByte).reshape({3, 64, 64}));
  });
})
PENSTOCK_DATASET(no_file, [](const penstock::Value&) -> std::shared_ptr<penstock::Dataset> {
  throw std::runtime_error("there is no file photographs.txt");
})
PENSTOCK_DATASET(no_dataset, [](const penstock::Value&) { return std::shared_ptr<penstock::Dataset>(); })
PENSTOCK_DATASET(bad_sample, [](const penstock::Value&) {
  return penstock::make_dataset(20, [](int64_t index) {
    if (index == 6) throw std::out_of_range("no sample here");
    return index;
  });
})
PENSTOCK_DATASET(ending_sample, [](const penstock::Value& arguments) {
  return penstock::make_dataset(20, [how = arguments["how"].text()](int64_t index) {
    if (index == 6) end_process(how);
    return index;
  });
})
// Tells by a file which process makes it, and goes on once there is another file.
PENSTOCK_DATASET(blocking_sample, [](const penstock::Value& arguments) {
  return penstock::make_dataset(6, [folder = arguments["folder"].text()](int64_t index) {
    std::ofstream(folder + "/process-" + std::to_string(::getpid()));
    while (::access((folder + "/go").c_str(), F_OK) != 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return index;
  });
})
// What its process is like, as far as it changes that itself afterwards.
PENSTOCK_DATASET(spoiling_sample, [](const penstock::Value&) {
  return penstock::make_dataset(1, [](int64_t) {
    static int64_t made_count = 0;
    const bool has_variable = ::getenv("SPOILT_BY_TEST") != nullptr;
    const bool is_double = c10::get_default_dtype_as_scalartype() == at::kDouble;
    const auto mask = static_cast<int64_t>(::umask(0007));
    ::setenv("SPOILT_BY_TEST", "1", 1);
    c10::set_default_dtype(caffe2::TypeMeta::Make<double>());
    std::thread([] { ::pause(); }).detach();
    return std::tuple(int64_t{::getpid()}, made_count++, int64_t{has_variable}, int64_t{is_double}, mask);
  });
})
// Whether its process can read the file.
PENSTOCK_DATASET(reading_sample, [](const penstock::Value& arguments) {
  return penstock::make_dataset(6, [file = arguments["file"].text()](int64_t) {
    return int64_t{std::ifstream(file).get() != std::ifstream::traits_type::eof()};
  });
})
// Leaves a process in a session of its own, which writes its number into the file, and ends.
PENSTOCK_DATASET(leaving_sample, [](const penstock::Value& arguments) {
  return penstock::make_dataset(20, [file = arguments["file"].text()](int64_t index) {
    if (index == 6) {
      if (const pid_t middle = ::fork(); middle != 0) {
        ::waitpid(middle, nullptr, 0);
        std::_Exit(1);
      }
      ::setsid();
      if (::fork() == 0) {
        std::ofstream(file, std::ios::app) << ::getpid() << std::endl;
        for (;;) ::pause();
      }
      std::_Exit(0);
    }
    return index;
  });
})
PENSTOCK_DATASET(fatal_sample, [](const penstock::Value&) {
  return penstock::make_dataset(20, [](int64_t index) {
    if (index == 6) std::abort();
    return index;
  });
})
