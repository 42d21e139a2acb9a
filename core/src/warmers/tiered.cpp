// tiered: two descriptors and a bit a slab. The first time a slab is routed it is read past the page cache, so that what
// is used once does not push out what is used often; from the second time on it goes through the page cache.
//
// Under a mapping the first read must still be what the matmul sees: the slab's whole pages are covered with anonymous
// memory, the O_DIRECT read lands there in place, and when the matmuls are over the file is mapped again. The pages a slab
// shares with a neighbour stay the file's: a fault brings them.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "moestream/error.h"
#include "scratch.h"

namespace moestream {
namespace {

class Tiered : public Warmer {
  public:
    explicit Tiered(const WarmerOptions& options) : scratch_(options), seen_(options.slabs) {}

    bool wants_direct() const override { return true; }
    Outcome warm(std::span<const MappedSlab> slabs) override {
        Outcome outcome;
        for (size_t i = 0; i < slabs.size(); ++i) {
            const auto& slab = slabs[i];
            outcome.bytes += slab.bytes;
            const bool again = seen_[slab.number];
            seen_[slab.number] = true;
            const int error = again || slab.direct_fd < 0 ? through(slab) : past(slab);
            if (error != 0) return {error, i, outcome.bytes};
        }
        return outcome;
    }
    int done(std::span<const MappedSlab>) override {
        for (const auto& cover : covers_) {
            if (mmap(cover.at, cover.bytes, PROT_READ, MAP_SHARED | MAP_FIXED, cover.fd,
                     static_cast<off_t>(cover.offset)) == MAP_FAILED) {
                return errno;
            }
        }
        covers_.clear();
        return 0;
    }
    std::map<std::string, uint64_t> counts() const override {
        return {{"reads past the page cache", past_}, {"reads through the page cache", through_}};
    }

  private:
    struct Cover {
        char* at;
        uint64_t bytes;
        int fd;
        uint64_t offset;
    };

    int through(const MappedSlab& slab) {
        ++through_;
        return scratch_.read_through(slab.fd, slab.offset, slab.bytes);
    }

    int past(const MappedSlab& slab) {
        const uint64_t begin = (slab.offset + kPage - 1) / kPage * kPage;
        const uint64_t end = (slab.offset + slab.bytes) / kPage * kPage;
        if (begin >= end) return through(slab);
        char* at = slab.address + (begin - slab.offset);
        if (mmap(at, end - begin, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
            MAP_FAILED) {
            return errno;
        }
        covers_.push_back({at, end - begin, slab.fd, begin});
        ++past_;
        for (uint64_t done = 0; done < end - begin;) {
            const ssize_t got =
                pread(slab.direct_fd, at + done, end - begin - done, static_cast<off_t>(begin + done));
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) return errno;
            if (got == 0) return ENODATA;
            done += static_cast<uint64_t>(got);
        }
        return 0;
    }

    Scratch scratch_;
    std::vector<bool> seen_;
    std::vector<Cover> covers_;  // of the route whose matmuls run
    uint64_t past_ = 0, through_ = 0;
};

const WarmerRegistration registration("tiered", "O_DIRECT the first time, through the page cache after; a bit a slab",
                                      [](const WarmerOptions& options, const std::string& argument) {
                                          no_argument("tiered", argument);
                                          return std::make_unique<Tiered>(options);
                                      });

}  // namespace
}  // namespace moestream
