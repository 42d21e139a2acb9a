// Memory that bytes are read into and thrown away: what stays is the page cache.
#pragma once
#include <cstdint>

#include "../stores/buffers.h"
#include "../stores/warmer.h"

namespace moestream {

class Scratch {
  public:
    static constexpr uint64_t kBytes = uint64_t{2} << 20;

    // `kBytes` with the options' alignment and page size. Throws Error(refused).
    explicit Scratch(const WarmerOptions& options);

    char* data() const { return buffers_.at(0); }
    uint64_t huge_bytes() const { return buffers_.huge_bytes(); }

    // pread of [offset, offset + bytes) piece by piece into the scratch. 0 or errno.
    int read_through(int fd, uint64_t offset, uint64_t bytes) const;

  private:
    Buffers buffers_;
};

}  // namespace moestream
