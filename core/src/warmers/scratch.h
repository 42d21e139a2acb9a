// Memory that bytes are read into and thrown away: what stays is the page cache.
#pragma once
#include <cstdint>

#include "../stores/warmer.h"

namespace moestream {

class Scratch {
  public:
    static constexpr uint64_t kBytes = uint64_t{2} << 20;

    // `kBytes` at a multiple of the options' alignment and at no larger power of two, so that arms differ in just
    // that; populated. Throws Error(refused); huge pages that were asked for and are not there are a fallback.
    explicit Scratch(const WarmerOptions& options);
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    char* data() const { return data_; }
    uint64_t huge_bytes() const { return huge_bytes_; }

    // pread of [offset, offset + bytes) piece by piece into the scratch. 0 or errno.
    int read_through(int fd, uint64_t offset, uint64_t bytes) const;

  private:
    char* base_ = nullptr;
    char* data_ = nullptr;
    uint64_t reserved_ = 0;
    uint64_t huge_bytes_ = 0;
};

}  // namespace moestream
