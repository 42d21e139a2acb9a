#include "buffers.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "moestream/error.h"

namespace moestream {
namespace {

constexpr uint64_t kHuge = uint64_t{2} << 20;

uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// AnonHugePages of the mappings between two addresses, bytes.
uint64_t huge_between(const char* begin, const char* end) {
    std::ifstream smaps("/proc/self/smaps");
    uint64_t total = 0;
    bool inside = false;
    for (std::string line; std::getline(smaps, line);) {
        unsigned long from = 0, to = 0, kilobytes = 0;
        if (std::sscanf(line.c_str(), "%lx-%lx ", &from, &to) == 2) {
            inside = from < reinterpret_cast<uintptr_t>(end) && to > reinterpret_cast<uintptr_t>(begin);
        } else if (inside && std::sscanf(line.c_str(), "AnonHugePages: %lu kB", &kilobytes) == 1) {
            total += uint64_t{kilobytes} << 10;
        }
    }
    return total;
}

}  // namespace

Buffers::Buffers(uint32_t count, uint64_t bytes, uint64_t alignment, bool huge,
                 const std::function<void(const std::string&)>& fallback)
    : count_(count) {
    // Huge pages begin at multiples of their size; else each address is a multiple of just what was asked for.
    const bool whole = huge || alignment >= kHuge;
    stride_ = round_up(bytes, whole ? kHuge : 2 * alignment);
    reserved_ = stride_ * count + 2 * kHuge;
    void* found = mmap(nullptr, reserved_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) {
        throw Error(ErrorKind::refused, std::string("no memory to read into: ") + std::strerror(errno));
    }
    base_ = static_cast<char*>(found);
    const uint64_t first = round_up(reinterpret_cast<uintptr_t>(base_), kHuge) + (whole ? 0 : alignment);
    first_ = reinterpret_cast<char*>(first);
    madvise(base_, reserved_, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    for (uint32_t number = 0; number < count; ++number) std::memset(at(number), 0, bytes);
    if (!huge) return;
    huge_bytes_ = std::min(huge_between(base_, base_ + reserved_), bytes * count);  // a neighbour may be in the mapping
    if (huge_bytes_ < bytes * count && fallback) {
        fallback("what is read into is not in huge pages: see /sys/kernel/mm/transparent_hugepage");
    }
}

Buffers::~Buffers() { munmap(base_, reserved_); }

}  // namespace moestream
