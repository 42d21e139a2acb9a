// How the `mapped` store asks the kernel for routed slabs before a matmul touches them. A member is one file with one
// registry line; `warm` is called once a route with its slabs in the order the matmuls need them.
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
    int direct_fd = -1;       // O_DIRECT; -1 where the member did not ask for it or the file system refuses
    uint64_t offset = 0;      // in the file
    uint64_t bytes = 0;
    uint32_t number = 0;  // of the slab, among all of the model
};

class Warmer {
  public:
    struct Outcome {
        int error = 0;       // errno; ENODATA: the file ended early
        size_t slab = 0;     // which one failed
        uint64_t bytes = 0;  // asked for: of slabs found in memory none
    };
    virtual ~Warmer() = default;
    // Advice that failed did not engage, and a run that counts on it must know.
    virtual Outcome warm(std::span<const MappedSlab> slabs) = 0;
    // The matmuls of these slabs are over.
    virtual int done(std::span<const MappedSlab>) { return 0; }
    virtual bool wants_direct() const { return false; }
    // What was done how often.
    virtual std::map<std::string, uint64_t> counts() const = 0;
};

struct WarmerOptions {
    uint64_t alignment = kPage;  // of scratch
    bool huge = false;           // scratch in huge pages
    uint32_t slabs = 0;          // of the model
    std::function<void(const std::string&)> fallback;
};

using WarmerFactory = std::function<std::unique_ptr<Warmer>(const WarmerOptions&, const std::string& argument)>;
using WarmerRegistration = Registration<WarmerFactory>;
// "willneed", "pread:4x2", "hybrid:mincore+background:2". Throws Error(usage), Error(unsupported).
std::unique_ptr<Warmer> make_warmer(const std::string& text, const WarmerOptions& options);

// Throws Error(usage) when there is one.
void no_argument(const char* name, const std::string& argument);

// Whole pages around a range: madvise refuses an unaligned start, and a neighbour's page costs less than a fault.
struct Pages {
    char* begin;
    size_t bytes;
};
Pages around(const char* address, uint64_t bytes);

// One advice call a slab.
class AdviceWarmer : public Warmer {
  public:
    Outcome warm(std::span<const MappedSlab> slabs) override;
    std::map<std::string, uint64_t> counts() const override { return {{"advice calls", calls_}}; }

  private:
    virtual int advise(const MappedSlab& slab) = 0;  // 0 or errno
    uint64_t calls_ = 0;
};

int advise_willneed(const MappedSlab& slab);

}  // namespace moestream
