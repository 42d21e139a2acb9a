// hybrid:mincore, hybrid:cachestat: ask which of a routed slab's pages are absent and read only those, by pread into
// scratch. mincore answers page by page; cachestat (Linux 6.5) counts, so a slab that lacks some is read whole.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "moestream/error.h"
#include "scratch.h"

namespace moestream {
namespace {

constexpr long kCachestat = 451;  // the same on every architecture

// The kernel's cachestat_range and cachestat.
struct Range {
    uint64_t offset = 0, bytes = 0;
};
struct Counts {
    uint64_t cached = 0, dirty = 0, writeback = 0, evicted = 0, recently_evicted = 0;
};

int cachestat(int fd, uint64_t offset, uint64_t bytes, uint64_t& cached) {
    Range range{offset, bytes};
    Counts counts;
    if (syscall(kCachestat, fd, &range, &counts, 0) != 0) return errno;
    cached = counts.cached;
    return 0;
}

class Hybrid : public Warmer {
  public:
    explicit Hybrid(const WarmerOptions& options) : scratch_(options) {}

    Outcome warm(std::span<const MappedSlab> slabs) override {
        Outcome outcome;
        for (size_t i = 0; i < slabs.size(); ++i) {
            ++asked_;
            const uint64_t before = read_;
            const int error = fetch_absent(slabs[i]);
            outcome.bytes += read_ - before;
            resident_ += slabs[i].bytes - std::min(slabs[i].bytes, read_ - before);
            if (error != 0) return {error, i, outcome.bytes};
        }
        return outcome;
    }
    std::map<std::string, uint64_t> counts() const override {
        return {{"residency questions", asked_}, {"bytes found resident", resident_}, {"bytes read", read_}};
    }

  protected:
    virtual int fetch_absent(const MappedSlab& slab) = 0;
    // Of the slab's bytes those in [begin, end) of the file.
    int fetch(const MappedSlab& slab, uint64_t begin, uint64_t end) {
        begin = std::max(begin, slab.offset);
        end = std::min(end, slab.offset + slab.bytes);
        if (begin >= end) return 0;
        read_ += end - begin;
        return scratch_.read_through(slab.fd, begin, end - begin);
    }

  private:
    Scratch scratch_;
    uint64_t asked_ = 0, resident_ = 0, read_ = 0;
};

class ByMincore : public Hybrid {
  public:
    using Hybrid::Hybrid;

  private:
    int fetch_absent(const MappedSlab& slab) override {
        const Pages pages = around(slab.address, slab.bytes);
        present_.resize((pages.bytes + kPage - 1) / kPage);
        if (mincore(pages.begin, pages.bytes, present_.data()) != 0) return errno;
        const uint64_t first = slab.offset - static_cast<uint64_t>(slab.address - pages.begin);
        for (size_t page = 0; page < present_.size();) {
            if (present_[page] & 1) {
                ++page;
                continue;
            }
            size_t end = page;
            while (end < present_.size() && !(present_[end] & 1)) ++end;
            const int error = fetch(slab, first + page * kPage, first + end * kPage);
            if (error != 0) return error;
            page = end;
        }
        return 0;
    }

    std::vector<unsigned char> present_;
};

class ByCachestat : public Hybrid {
  public:
    explicit ByCachestat(const WarmerOptions& options) : Hybrid(options) {
        uint64_t cached = 0;
        // No file yet: a kernel that has the call complains of the descriptor, one that has not of the call.
        const int error = cachestat(-1, 0, 0, cached);
        if (error != EBADF) {
            throw Error(ErrorKind::unsupported,
                        "hybrid:cachestat: the kernel refuses cachestat (" + std::string(std::strerror(error)) +
                            "); Linux 6.5 or newer has it, hybrid:mincore asks the same");
        }
    }

  private:
    int fetch_absent(const MappedSlab& slab) override {
        uint64_t cached = 0;
        const int error = cachestat(slab.fd, slab.offset, slab.bytes, cached);
        if (error != 0) return error;
        const uint64_t pages = (slab.offset + slab.bytes + kPage - 1) / kPage - slab.offset / kPage;
        return cached >= pages ? 0 : fetch(slab, slab.offset, slab.offset + slab.bytes);
    }
};

const WarmerRegistration registration(
    "hybrid", "asks which pages are absent (mincore or cachestat) and reads only those",
    [](const WarmerOptions& options, const std::string& argument) -> std::unique_ptr<Warmer> {
        if (argument == "mincore" || argument.empty()) return std::make_unique<ByMincore>(options);
        if (argument == "cachestat") return std::make_unique<ByCachestat>(options);
        throw Error(ErrorKind::usage, "hybrid asks by mincore or cachestat, not '" + argument + "'");
    });

}  // namespace
}  // namespace moestream
