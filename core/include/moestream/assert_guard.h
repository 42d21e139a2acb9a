// An assertion of ggml's that fails ends the process. While a thread has a guard, one that fails on that thread is
// thrown as a std::runtime_error instead, which llama.cpp's own `catch` around loading a model and making a context
// takes for a failed load: it frees what it has made and returns null.
//
// For these calls only. They run on one thread; in a decode an assertion may fail on a worker, where nothing catches,
// and other threads keep what they had: the callback that was set before, or ggml's own words and the end.
#pragma once
#include <string>

#include "moestream/llama_abi.h"

namespace moestream {

class AssertGuard {
  public:
    explicit AssertGuard(abi::SetAbortCallback set);
    ~AssertGuard();
    AssertGuard(const AssertGuard&) = delete;
    AssertGuard& operator=(const AssertGuard&) = delete;

    // What failed on this thread since the outermost guard began, with its place in the source; "": nothing.
    static const std::string& failed();

  private:
    abi::SetAbortCallback set_;
};

}  // namespace moestream
