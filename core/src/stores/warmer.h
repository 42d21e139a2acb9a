// How the `mapped` store asks the kernel for routed slabs before a matmul touches them. A member is one file with
// one registry line; `warm` is called once per routed slab, in the order the matmuls need them.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "moestream/registry.h"

namespace moestream {

struct MappedSlab {
    char* address = nullptr;  // in the shard's mapping
    int fd = -1;
    uint64_t offset = 0;  // in the file
    uint64_t bytes = 0;
};

class Warmer {
  public:
    virtual ~Warmer() = default;
    // 0 or errno: advice that failed did not engage, and a run that counts on it must know.
    virtual int warm(const MappedSlab& slab) = 0;
};

using WarmerFactory = std::function<std::unique_ptr<Warmer>(const std::string& argument)>;
using WarmerRegistration = Registration<WarmerFactory>;

// The steps the members are made of.
int advise_willneed(const MappedSlab& slab);
// Reads the slab into a scratch buffer of `scratch_bytes` (the bytes are thrown away: the page cache keeps them).
int read_through(const MappedSlab& slab, char* scratch, uint64_t scratch_bytes);

}  // namespace moestream
