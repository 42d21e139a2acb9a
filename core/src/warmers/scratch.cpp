#include "scratch.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

#include "moestream/error.h"

namespace moestream {
namespace {

constexpr uint64_t kHuge = uint64_t{2} << 20;

// AnonHugePages of the mapping that holds an address, bytes.
uint64_t huge_at(const char* address) {
    std::ifstream smaps("/proc/self/smaps");
    std::string line;
    bool inside = false;
    while (std::getline(smaps, line)) {
        unsigned long begin = 0, end = 0;
        if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
            const auto at = reinterpret_cast<unsigned long>(address);
            inside = at >= begin && at < end;
        }
        unsigned long kilobytes = 0;
        if (inside && std::sscanf(line.c_str(), "AnonHugePages: %lu kB", &kilobytes) == 1) return kilobytes << 10;
    }
    return 0;
}

}  // namespace

Scratch::Scratch(const WarmerOptions& options) : reserved_(kBytes + 2 * kHuge) {
    void* found = mmap(nullptr, reserved_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) {
        throw Error(ErrorKind::refused, std::string("no memory to read into: ") + std::strerror(errno));
    }
    base_ = static_cast<char*>(found);
    const auto whole = (reinterpret_cast<uintptr_t>(base_) + kHuge - 1) / kHuge * kHuge;
    // Huge pages begin at multiples of their size; else the address is a multiple of just what was asked for.
    const uint64_t shift = options.huge || options.alignment >= kHuge ? 0 : options.alignment;
    data_ = reinterpret_cast<char*>(whole + shift);
    madvise(base_, reserved_, options.huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    std::memset(data_, 0, kBytes);
    if (!options.huge) return;
    huge_bytes_ = std::min(huge_at(data_), kBytes);
    if (huge_bytes_ < kBytes && options.fallback) {
        options.fallback("scratch is not in huge pages: see /sys/kernel/mm/transparent_hugepage");
    }
}

Scratch::~Scratch() { munmap(base_, reserved_); }

int Scratch::read_through(int fd, uint64_t offset, uint64_t bytes) const {
    for (uint64_t done = 0; done < bytes;) {
        const uint64_t want = std::min(kBytes, bytes - done);
        const ssize_t got = pread(fd, data_, want, static_cast<off_t>(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return errno;
        if (got == 0) return ENODATA;
        done += static_cast<uint64_t>(got);
    }
    return 0;
}

}  // namespace moestream
