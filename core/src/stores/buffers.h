// Memory that reads go into on their way to somewhere else, as a mechanism asks for it: alignment and page size.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

namespace moestream {

class Buffers {
  public:
    // `count` buffers of `bytes`, each at a multiple of `alignment` and at no larger power of two below 2 MiB, so that
    // arms differ in just that; populated. `huge`: in huge pages; where these are not to be had `fallback` is told.
    // Throws Error(refused).
    Buffers(uint32_t count, uint64_t bytes, uint64_t alignment, bool huge,
            const std::function<void(const std::string&)>& fallback);
    ~Buffers();
    Buffers(const Buffers&) = delete;
    Buffers& operator=(const Buffers&) = delete;

    uint32_t count() const { return count_; }
    char* at(uint32_t number) const { return first_ + number * stride_; }
    uint64_t huge_bytes() const { return huge_bytes_; }  // as the kernel said after they were populated

  private:
    uint32_t count_;
    uint64_t stride_ = 0;
    uint64_t reserved_ = 0;
    uint64_t huge_bytes_ = 0;
    char* base_ = nullptr;
    char* first_ = nullptr;
};

}  // namespace moestream
