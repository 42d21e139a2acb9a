// Direct reads of a file: refused with a reason, or an alignment at which reads of every place bring the file's bytes.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "moestream/direct.h"
#include "moestream/slab_index.h"

using namespace moestream;
using namespace moestream::test;

namespace {

// A file of that many bytes, gone with the object.
class Named {
  public:
    explicit Named(size_t bytes) : content(bytes) {
        const char* directory = getenv("TMPDIR");
        path = std::string(directory != nullptr ? directory : "/tmp") + "/moestream-direct-XXXXXX";
        const int fd = mkstemp(path.data());
        unsigned state = 1;
        for (auto& byte : content) byte = static_cast<char>((state = state * 1664525U + 1013904223U) >> 24);
        CHECK(write(fd, content.data(), bytes) == static_cast<ssize_t>(bytes));
        CHECK(fsync(fd) == 0);
        close(fd);
    }
    ~Named() { unlink(path.c_str()); }
    Named(const Named&) = delete;
    Named& operator=(const Named&) = delete;

    std::string path;
    std::vector<char> content;
};

void refused(const std::string& path, const std::string& reason) {
    const DirectReads found = open_direct(path);
    CHECK(found.fd == -1);
    CHECK(found.alignment == 0);
    CHECK(found.refusal.find(reason) != std::string::npos);
}

// Whole pages from a place that is a multiple of the alignment, and the file's end.
void brings_the_bytes(const Named& file) {
    const DirectReads found = open_direct(file.path);
    if (found.fd < 0) {
        CHECK(!found.refusal.empty());
        std::fprintf(stderr, "no direct reads of %s: %s\n", file.path.c_str(), found.refusal.c_str());
        return;
    }
    CHECK(found.refusal.empty());
    CHECK(found.alignment > 0 && kPage % found.alignment == 0);
    auto* page = static_cast<char*>(std::aligned_alloc(kPage, kPage));
    for (const uint64_t at : {uint64_t{0}, uint64_t{found.alignment}, (file.content.size() - 1) / kPage * kPage}) {
        if (at >= file.content.size()) continue;
        const auto expected = std::min<uint64_t>(kPage, file.content.size() - at);
        CHECK(pread(found.fd, page, kPage, static_cast<off_t>(at)) == static_cast<ssize_t>(expected));
        CHECK(std::memcmp(page, file.content.data() + at, expected) == 0);
    }
    std::free(page);
    close(found.fd);
}

}  // namespace

int main() {
    refused("/no/such/file", "open: No such file or directory");
    refused("/proc/self/status", "");
    const Named empty(0);
    refused(empty.path, "");
    for (const size_t bytes : {size_t{1}, size_t{512}, size_t{4097}, size_t{1} << 20, (size_t{1} << 20) + 77}) {
        brings_the_bytes(Named(bytes));
    }
    return checks_failed();
}
