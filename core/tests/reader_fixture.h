// What the readers' tests share: a file of known bytes, aligned memory, and reading a
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
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "moestream/reader.h"

namespace moestream::test {

inline constexpr uint64_t kMostFile = 4 << 20;

// The first bytes of every test file; no two blocks are alike.
inline const std::vector<uint8_t>& pattern() {
    static const std::vector<uint8_t> bytes = [] {
        std::mt19937_64 random(1);
        std::vector<uint8_t> filled(kMostFile);
        for (uint64_t at = 0; at < kMostFile; at += 8) {
            const uint64_t word = random();
            std::memcpy(filled.data() + at, &word, 8);
        }
        return filled;
    }();
    return bytes;
}

// A file of that many bytes, without a name: gone with the object, however the test ends. Direct where the file system takes it.
class PatternFile {
  public:
    explicit PatternFile(uint64_t bytes) : bytes_(bytes) {
        const char* directory = getenv("TMPDIR");
        std::string path = std::string(directory != nullptr ? directory : "/tmp") + "/moestream-readers-XXXXXX";
        const int fd = mkstemp(path.data());
        if (fd < 0) fatal("mkstemp");
        if (bytes > kMostFile) std::abort();
        for (uint64_t at = 0; at < bytes;) {
            const ssize_t put = write(fd, pattern().data() + at, bytes - at);
            if (put <= 0) fatal("write");
            at += static_cast<uint64_t>(put);
        }
        close(fd);
        buffered_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (buffered_ < 0) fatal("open");
        direct_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
        if (direct_ < 0) std::fprintf(stderr, "no O_DIRECT on %s: buffered reads only\n", path.c_str());
        unlink(path.c_str());
    }
    ~PatternFile() {
        close(buffered_);
        if (direct_ >= 0) close(direct_);
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
    return offset + bytes <= kMostFile && std::memcmp(memory, pattern().data() + offset, bytes) == 0;
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
