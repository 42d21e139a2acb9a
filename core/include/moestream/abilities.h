// What members need of this kernel that a system may lack: an old kernel, a sandbox that forbids a call. Each is tried,
// harmlessly, in the way the member uses it; nobody looks up versions.
#pragma once
#include <cstdint>
#include <map>
#include <string>

namespace moestream {

// By name ("io_uring", "cachestat", "mincore", "mremap", "populate"): '' where this system grants it, else one line that
// says what is refused and what would help.
std::map<std::string, std::string> abilities();

// How many of `count` threads this process can start now, beside those it has: each is started, and ends. They allocate
// nothing, for each that does keeps address space for good.
uint32_t startable_threads(uint32_t count);

}  // namespace moestream
