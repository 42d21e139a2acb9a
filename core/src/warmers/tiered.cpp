// tiered: two descriptors and a bit a slab. The first time a slab is routed it is read past the page cache, so that what
// is used once does not push out what is used often; from the second time on it goes through the page cache.
//
// Where this was seen the matmul read a copy. Under a mapping the first read must still be what the matmul sees: the
// slab's whole pages are covered with anonymous memory, the O_DIRECT read lands there in place, and when the matmuls are
// over the file is mapped again. Faithful: the first touch of whole pages leaves the page cache alone, the second fills
// it. Not faithful: the pages a slab shares with a neighbour stay the file's, and a fault brings them (with what the
// kernel reads around it, unless the mapping's advice is random); and slabs that would need more than kMostCovered of
// covers at once are read through the page cache the first time too.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "moestream/error.h"
#include "scratch.h"

namespace moestream {
namespace {

constexpr uint64_t kMostCovered = uint64_t{256} << 20;  // memory that no plan knows of: a prompt may want a whole layer

class Tiered : public Warmer {
  public:
    explicit Tiered(const WarmerOptions& options)
        : scratch_(options), advice_(options.advice), seen_(options.slabs), cover_(options.slabs) {}

    void open(const std::string& path, int, int direct_fd) override {
        if (direct_fd >= 0) return;
        throw Error(ErrorKind::unsupported, "tiered: O_DIRECT is refused on " + path +
                                                ": keep the model on ext4, xfs or btrfs, or use mapped+pread");
    }
    bool wants_direct() const override { return true; }
    Trouble warm(std::span<MappedSlab> slabs) override {
        for (auto& slab : slabs) {
            if (cover_[slab.number].bytes > 0) continue;  // read early, and still there
            const bool first = !seen_[slab.number];
            seen_[slab.number] = true;
            const int error = first ? past(slab) : through(slab);
            if (error != 0) return {error, slab};
            slab.asked = slab.bytes;
        }
        return {};
    }
    int done(std::span<const MappedSlab> slabs) override {
        int error = 0;
        for (const auto& slab : slabs) {
            auto& cover = cover_[slab.number];
            if (cover.bytes == 0) continue;
            if (mmap(cover.at, cover.bytes, PROT_READ, MAP_SHARED | MAP_FIXED, slab.fd,
                     static_cast<off_t>(cover.offset)) == MAP_FAILED) {
                error = errno;
                continue;
            }
            if (advice_ != MADV_NORMAL && madvise(cover.at, cover.bytes, advice_) != 0) error = errno;
            covered_ -= cover.bytes;
            cover = {};
        }
        return error;
    }
    std::map<std::string, uint64_t> counts() const override {
        return {{"reads past the page cache", past_}, {"reads through the page cache", through_}};
    }

  private:
    struct Cover {
        char* at = nullptr;
        uint64_t bytes = 0;
        uint64_t offset = 0;
    };

    int through(const MappedSlab& slab) {
        ++through_;
        return scratch_.read_through(slab.fd, slab.offset, slab.bytes);
    }

    int past(const MappedSlab& slab) {
        const uint64_t begin = (slab.offset + kPage - 1) / kPage * kPage;
        const uint64_t end = (slab.offset + slab.bytes) / kPage * kPage;
        if (begin >= end || covered_ + (end - begin) > kMostCovered) return through(slab);
        char* at = slab.address + (begin - slab.offset);
        if (mmap(at, end - begin, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
            MAP_FAILED) {
            return errno;
        }
        cover_[slab.number] = {at, end - begin, begin};
        covered_ += end - begin;
        ++past_;
        for (uint64_t there = 0; there < end - begin;) {
            const uint64_t from = there / kPage * kPage;  // after a short read a direct one goes on from a whole page
            const ssize_t got = pread(slab.direct_fd, at + from, end - begin - from, static_cast<off_t>(begin + from));
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) return errno;
            if (from + static_cast<uint64_t>(got) <= there) return ENODATA;
            there = from + static_cast<uint64_t>(got);
        }
        return 0;
    }

    Scratch scratch_;
    int advice_;
    std::vector<bool> seen_;
    std::vector<Cover> cover_;  // by slab: what lies over the file until `done`
    uint64_t covered_ = 0;
    uint64_t past_ = 0, through_ = 0;
};

const WarmerRegistration registration("tiered", "O_DIRECT the first time, through the page cache after; a bit a slab",
                                      [](const WarmerOptions& options, const std::string& argument) {
                                          expect_no_argument("tiered", argument);
                                          return std::make_unique<Tiered>(options);
                                      });

}  // namespace
}  // namespace moestream
