#include "moestream/direct.h"

#include <fcntl.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <linux/stat.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <span>

#include "moestream/slab_index.h"

namespace moestream {
namespace {

// Headers older than Linux 6.1 do not name it; a kernel that does not know it leaves its bit out of the answer's mask.
constexpr uint32_t kStatxDioAlign = 0x2000;
constexpr uint32_t kUnknown = UINT32_MAX;
constexpr size_t kExtentsAtOnce = 64;

struct StatxAnswer {  // struct statx, whose fields older headers lack
    uint32_t mask;
    std::array<char, 148> other;
    uint32_t memory_alignment;
    uint32_t offset_alignment;
    std::array<char, 96> later;
};
static_assert(sizeof(StatxAnswer) == 256);

// What offsets must be multiples of, as the file system says: 0 where it reads through the page cache whatever it is
// asked, kUnknown where it says nothing.
uint32_t stated_alignment(int fd) {
    StatxAnswer answer{};
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kStatxDioAlign, &answer) != 0) return kUnknown;
    if ((answer.mask & kStatxDioAlign) == 0) return kUnknown;
    return std::max(answer.memory_alignment, answer.offset_alignment);
}

// Whether some extent is not stored as it is read. False where the file system does not tell.
bool has_encoded_extents(int fd) {
    alignas(fiemap) std::array<char, sizeof(fiemap) + kExtentsAtOnce * sizeof(fiemap_extent)> memory;
    for (uint64_t start = 0;;) {
        memory.fill(0);
        auto* asked = reinterpret_cast<fiemap*>(memory.data());
        asked->fm_start = start;
        asked->fm_length = FIEMAP_MAX_OFFSET - start;
        asked->fm_extent_count = kExtentsAtOnce;
        if (ioctl(fd, FS_IOC_FIEMAP, asked) != 0 || asked->fm_mapped_extents == 0) return false;
        const std::span extents(reinterpret_cast<const fiemap_extent*>(asked + 1), asked->fm_mapped_extents);
        for (const auto& extent : extents) {
            if ((extent.fe_flags & FIEMAP_EXTENT_ENCODED) != 0) return true;
            if ((extent.fe_flags & FIEMAP_EXTENT_LAST) != 0) return false;
            start = extent.fe_logical + extent.fe_length;
        }
    }
}

// Reads at multiples of `alignment` that are no larger power's: inside the file, at its start and its tail.
// '' or which read failed and why.
std::string failed_read(int fd, uint64_t file_bytes, uint32_t alignment, char* buffer) {
    const uint64_t inside = file_bytes >= 2 * uint64_t{alignment} ? alignment : 0;
    const uint64_t tail = (file_bytes - 1) / alignment * alignment;
    for (const uint64_t offset : {uint64_t{0}, inside, tail}) {
        const auto expected = static_cast<ssize_t>(std::min<uint64_t>(alignment, file_bytes - offset));
        ssize_t got = 0;
        do {
            got = pread(fd, buffer, alignment, static_cast<off_t>(offset));
        } while (got < 0 && errno == EINTR);
        if (got == expected) continue;
        return "a read of " + std::to_string(alignment) + " bytes at " + std::to_string(offset) + ": " +
               (got < 0 ? std::strerror(errno) : std::to_string(got) + " bytes came");
    }
    return "";
}

// The least alignment that works, tried from what the file system states.
void prove(DirectReads& direct, uint64_t file_bytes, uint32_t stated) {
    void* pages = mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) {
        direct.refusal = std::string("memory to try a read with: ") + std::strerror(errno);
        return;
    }
    for (uint32_t alignment = stated == kUnknown ? 512 : stated; alignment <= kPage; alignment *= 2) {
        // The buffer is aligned to just this length, not to a page.
        char* buffer = static_cast<char*>(pages) + alignment % kPage;
        direct.refusal = failed_read(direct.fd, file_bytes, alignment, buffer);
        if (!direct.refusal.empty()) continue;
        direct.alignment = alignment;
        break;
    }
    munmap(pages, 2 * kPage);
}

void examine(DirectReads& direct) {
    struct stat status {};
    if (fstat(direct.fd, &status) != 0) {
        direct.refusal = std::strerror(errno);
        return;
    }
    const uint32_t stated = stated_alignment(direct.fd);
    if (!S_ISREG(status.st_mode) || status.st_size == 0) {
        direct.refusal = "there is nothing to read";
    } else if (stated == 0) {
        direct.refusal = "the file system reads this file through the page cache";
    } else if (stated != kUnknown && stated > kPage) {
        direct.refusal = "reads must be multiples of " + std::to_string(stated) + " bytes, more than a page";
    } else if (has_encoded_extents(direct.fd)) {
        direct.refusal = "it is stored compressed, and comes through the page cache";
    } else {
        prove(direct, static_cast<uint64_t>(status.st_size), stated);
    }
}

}  // namespace

DirectReads open_direct(const std::string& path) {
    DirectReads direct;
    direct.fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (direct.fd < 0) {
        direct.refusal = std::string("open: ") + std::strerror(errno);
        return direct;
    }
    examine(direct);
    if (direct.refusal.empty()) return direct;
    close(direct.fd);
    direct.fd = -1;
    return direct;
}

}  // namespace moestream
