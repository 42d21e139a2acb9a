// What the readers' tests share: a file whose every byte follows from its offset, aligned memory, and reading a
// reader empty.
#pragma once
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "moestream/reader.h"

namespace moestream::test {

inline uint8_t byte_at(uint64_t offset) {
    uint64_t x = offset / 8 + 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return static_cast<uint8_t>((x ^ (x >> 31)) >> (offset % 8 * 8));
}

// A file of that many bytes, gone with the object. Direct where the file system takes it.
class PatternFile {
  public:
    explicit PatternFile(uint64_t bytes) : bytes_(bytes) {
        const char* directory = getenv("TMPDIR");
        path_ = std::string(directory != nullptr ? directory : "/tmp") + "/moestream-readers-XXXXXX";
        const int fd = mkstemp(path_.data());
        if (fd < 0) fatal("mkstemp");
        std::vector<uint8_t> content(bytes);
        for (uint64_t i = 0; i < bytes; ++i) content[i] = byte_at(i);
        for (uint64_t at = 0; at < bytes;) {
            const ssize_t put = write(fd, content.data() + at, bytes - at);
            if (put <= 0) fatal("write");
            at += static_cast<uint64_t>(put);
        }
        close(fd);
        buffered_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
        if (buffered_ < 0) fatal("open");
        direct_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
        if (direct_ < 0) std::fprintf(stderr, "no O_DIRECT on %s: buffered reads only\n", path_.c_str());
    }
    ~PatternFile() {
        close(buffered_);
        if (direct_ >= 0) close(direct_);
        unlink(path_.c_str());
    }
    PatternFile(const PatternFile&) = delete;
    PatternFile& operator=(const PatternFile&) = delete;
    int direct() const { return direct_ >= 0 ? direct_ : buffered_; }
    int buffered() const { return buffered_; }
    uint64_t bytes() const { return bytes_; }

  private:
    [[noreturn]] static void fatal(const char* what) {
        std::perror(what);
        std::exit(1);
    }
    std::string path_;
    uint64_t bytes_;
    int buffered_ = -1;
    int direct_ = -1;
};

struct Freed {
    void operator()(uint8_t* memory) const { free(memory); }
};
using Memory = std::unique_ptr<uint8_t[], Freed>;

inline Memory aligned_memory(size_t bytes, uint8_t fill = 0) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 4096, bytes) != 0) std::abort();
    std::memset(memory, fill, bytes);
    return Memory(static_cast<uint8_t*>(memory));
}

inline bool is_pattern(const uint8_t* memory, uint64_t offset, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) {
        if (memory[i] != byte_at(offset + i)) return false;
    }
    return true;
}

inline bool is_filled(const uint8_t* memory, size_t bytes, uint8_t fill) {
    return std::all_of(memory, memory + bytes, [&](uint8_t byte) { return byte == fill; });
}

// All completions of what is in flight, in the order reaped.
inline std::vector<Completion> reap_all(Reader& reader) {
    std::vector<Completion> all;
    Completion done[7];
    while (reader.in_flight() > 0) {
        const size_t count = reader.reap(done, true);
        CHECK(count > 0);
        if (count == 0) break;
        all.insert(all.end(), done, done + count);
    }
    return all;
}

inline std::vector<uint32_t> tags(const std::vector<Completion>& completions) {
    std::vector<uint32_t> result;
    for (const auto& completion : completions) result.push_back(completion.tag);
    return result;
}

// False, once said, where this kernel has no io_uring for us: its tests are skipped.
inline bool have_uring() {
    static const bool have = [] {
        try {
            make_reader("uring:1", {});
            return true;
        } catch (const Error& error) {
            if (error.kind != ErrorKind::unsupported) throw;
            std::fprintf(stderr, "skipping io_uring: %s\n", error.what());
            return false;
        }
    }();
    return have;
}

inline int exit_code() { return checks_failed() != 0 ? 1 : have_uring() ? 0 : kSkip; }

}  // namespace moestream::test
