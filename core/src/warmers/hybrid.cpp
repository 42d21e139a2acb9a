// hybrid:mincore, hybrid:cachestat: ask which of a routed slab's pages are absent and read only those: advice, then pread
// into scratch. mincore answers page by page; cachestat (Linux 6.5) counts, so a slab that lacks some is halved until
// the absent part is found.
//
// To anybody who could not write the file mincore answers that all of it is there, and newer kernels refuse cachestat:
// that is found out when a file is opened, not believed.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "moestream/error.h"
#include "residency.h"
#include "scratch.h"

namespace moestream {
namespace {

constexpr uint64_t kFewPages = 8;  // read rather than asked about again

class Hybrid : public Warmer {
  public:
    explicit Hybrid(const WarmerOptions& options) : scratch_(options) {}

    Trouble warm(std::span<MappedSlab> slabs) override {
        for (auto& slab : slabs) {
            slab.asked = 0;
            const int error = fetch_absent(slab);
            if (error != 0) return {error, slab};
            read_ += slab.asked;
            resident_ += slab.bytes - slab.asked;
        }
        return {};
    }
    std::map<std::string, uint64_t> counts() const override {
        return {{"residency questions", asked_}, {"bytes found resident", resident_}, {"bytes read", read_}};
    }

  protected:
    // Asks, and fetches what is not there. 0 or errno.
    virtual int fetch_absent(MappedSlab& slab) = 0;
    // Of the slab's bytes those in [begin, end) of the file: advice for the whole run first, so that it is one request.
    int fetch(MappedSlab& slab, uint64_t begin, uint64_t end) {
        begin = std::max(begin, slab.offset);
        end = std::min(end, slab.offset + slab.bytes);
        if (begin >= end) return 0;
        const int error = advise_willneed(slab.address + (begin - slab.offset), end - begin);
        if (error != 0) return error;
        slab.asked += end - begin;
        return scratch_.read_through(slab.fd, begin, end - begin);
    }
    std::atomic<uint64_t> asked_{0};

  private:
    Scratch scratch_;
    std::atomic<uint64_t> resident_{0}, read_{0};
};

class ByMincore : public Hybrid {
  public:
    using Hybrid::Hybrid;

    void open(const std::string& path, int fd, int) override {
        if (const std::string why = mincore_refused(); !why.empty()) throw Error(ErrorKind::unsupported, why);
        struct stat status {};
        const std::string name = "/proc/self/fd/" + std::to_string(fd);
        const bool owner = geteuid() == 0 || (fstat(fd, &status) == 0 && status.st_uid == geteuid());
        if (owner || faccessat(AT_FDCWD, name.c_str(), W_OK, AT_EACCESS) == 0) return;
        throw Error(ErrorKind::unsupported, "hybrid:mincore: the kernel tells only who owns or may write " + path +
                                                " what of it is in memory: own a copy, or use mapped+pread");
    }

  private:
    int fetch_absent(MappedSlab& slab) override {
        const Pages pages = around(slab.address, slab.bytes);
        present_.resize((pages.bytes + kPage - 1) / kPage);
        ++asked_;
        if (mincore(pages.begin, pages.bytes, present_.data()) != 0) return errno;
        const uint64_t first = slab.offset / kPage * kPage;
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

    std::vector<unsigned char> present_;  // grows to the largest slab and no further
};

class ByCachestat : public Hybrid {
  public:
    using Hybrid::Hybrid;

    void open(const std::string& path, int fd, int) override {
        if (const std::string why = cachestat_refused(path, fd); !why.empty()) throw Error(ErrorKind::unsupported, why);
    }

  private:
    int fetch_absent(MappedSlab& slab) override {
        run_begin_ = run_end_ = 0;
        const uint64_t end = (slab.offset + slab.bytes + kPage - 1) / kPage * kPage;
        const int error = search(slab, slab.offset / kPage * kPage, end);
        return error != 0 ? error : fetch(slab, run_begin_, run_end_);
    }
    // Halves [begin, end) until a part is all there, all absent, or not worth another question; absent neighbours are
    // fetched together.
    int search(MappedSlab& slab, uint64_t begin, uint64_t end) {
        uint64_t cached = 0;
        ++asked_;
        int error = count_cached(slab.fd, begin, end - begin, cached);
        const uint64_t pages = (end - begin) / kPage;
        if (error != 0 || cached >= pages) return error;
        if (cached > 0 && pages > kFewPages) {
            const uint64_t middle = begin + pages / 2 * kPage;
            error = search(slab, begin, middle);
            return error != 0 ? error : search(slab, middle, end);
        }
        if (begin != run_end_) {
            error = fetch(slab, run_begin_, run_end_);
            run_begin_ = begin;
        }
        run_end_ = end;
        return error;
    }

    uint64_t run_begin_ = 0, run_end_ = 0;
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
