#include "moestream/assert_guard.h"

#include <cstdio>
#include <mutex>
#include <stdexcept>
#include <string_view>

namespace moestream {
namespace {

thread_local int t_guards = 0;
thread_local std::string t_failed;

// ggml has one callback for the whole process: ours is set while any thread has a guard.
std::mutex mutex;
int guards = 0;
abi::AbortCallback before = nullptr;

// "/where/it/was/built/llama-model.cpp:12: GGML_ASSERT(...) failed", without the directories.
std::string without_directories(std::string_view text) {
    const auto place = text.substr(0, text.find(": "));
    const auto slash = place.rfind('/');
    return std::string(slash == std::string_view::npos ? text : text.substr(slash + 1));
}

void on_abort(const char* text) {
    if (t_guards > 0) {
        t_failed = without_directories(text);
        throw std::runtime_error(t_failed);
    }
    // As it would have been: the caller's own, or ggml's words. ggml ends the process next.
    if (before != nullptr) return before(text);
    std::fprintf(stderr, "%s\n", text);
}

}  // namespace

AssertGuard::AssertGuard(abi::SetAbortCallback set) : set_(set) {
    const std::lock_guard lock(mutex);
    if (guards == 0) before = set_(&on_abort);
    ++guards;
    if (t_guards++ == 0) t_failed.clear();
}

AssertGuard::~AssertGuard() {
    const std::lock_guard lock(mutex);
    --t_guards;
    if (--guards > 0) return;
    // Who set another one meanwhile keeps it.
    const auto found = set_(before);
    if (found != &on_abort) set_(found);
}

const std::string& AssertGuard::failed() { return t_failed; }

}  // namespace moestream
