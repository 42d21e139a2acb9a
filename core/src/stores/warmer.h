// How the `mapped` store asks the kernel for routed slabs before a matmul touches them. A member is one file with one
// registry line.
//
// Who calls what: `open` for each shard; `warm` once a route with its slabs in the order the matmuls need them, and for
// slabs that may be wanted soon; `done` for each of them once its matmuls are over; `settle` after a failure was
// reported. All by the thread that decodes; `counts` too.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "moestream/registry.h"
#include "moestream/slab_index.h"

namespace moestream {

struct MappedSlab {
    char* address = nullptr;  // in the shard's mapping
    int fd = -1;              // buffered
    int direct_fd = -1;       // O_DIRECT; -1 where the member did not ask for it
    uint64_t offset = 0;      // in the file
    uint64_t bytes = 0;
    uint32_t number = 0;      // of the slab, among all of the model
    uint64_t asked = 0;       // set by `warm`: bytes it asked for; none of a slab found in memory
};

class Warmer {
  public:
    struct Trouble {
        int error = 0;  // errno; ENODATA: the file ended early; 0: none
        MappedSlab slab;
    };
    virtual ~Warmer() = default;
    // Each file once, before its slabs. Throws Error(unsupported) when what the member promises cannot be done with it.
    virtual void open(const std::string& path, int fd, int direct_fd) {
        (void)path, (void)fd, (void)direct_fd;
    }
    // Advice that failed did not engage, and a run that counts on it must know.
    virtual Trouble warm(std::span<MappedSlab> slabs) = 0;
    // The matmuls of these slabs are over, or will not come. 0 or errno.
    virtual int done(std::span<const MappedSlab>) { return 0; }
    // What has not been started is dropped, and trouble not told yet forgotten: it belongs to a step that has failed.
    virtual void settle() {}
    virtual bool wants_direct() const { return false; }
    // `warm` returns before the bytes are there.
    virtual bool asynchronous() const { return false; }
    // What was done how often.
    virtual std::map<std::string, uint64_t> counts() const = 0;
};

struct WarmerOptions {
    uint64_t alignment = kPage;  // of scratch
    bool huge = false;           // scratch in huge pages
    int advice = 0;              // madvise's, of the slabs' mapping: what is mapped anew gets it again
    uint32_t slabs = 0;          // of the model
    std::function<void(const std::string&)> fallback;
};

using WarmerFactory = std::function<std::unique_ptr<Warmer>(const WarmerOptions&, const std::string& argument)>;
using WarmerRegistration = Registration<WarmerFactory>;
// "willneed", "pread:4x2", "hybrid:mincore+background:2". Throws Error(usage), Error(refused), Error(unsupported).
std::unique_ptr<Warmer> make_warmer(const std::string& text, const WarmerOptions& options);

// Of members that read into nothing. Throws Error(refused) when scratch of some kind was asked for.
void no_scratch(const char* name, const WarmerOptions& options);

// Whole pages around a range: madvise refuses an unaligned start, and a neighbour's page costs less than a fault.
struct Pages {
    char* begin;
    size_t bytes;
};
Pages around(const char* address, uint64_t bytes);

// One advice call a slab.
class AdviceWarmer : public Warmer {
  public:
    Trouble warm(std::span<MappedSlab> slabs) override;
    bool asynchronous() const override { return true; }
    std::map<std::string, uint64_t> counts() const override { return {{"advice calls", calls_}}; }

  private:
    virtual int advise(const MappedSlab& slab) = 0;  // 0 or errno
    std::atomic<uint64_t> calls_{0};
};

int advise_willneed(const char* address, uint64_t bytes);

}  // namespace moestream
