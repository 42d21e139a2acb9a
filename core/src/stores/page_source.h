// Where the pages of a slab that is about to be read come from, and where those of an evicted one go. A member is one
// file with one registry line. `recycle` is what the arena is for; the others are what one would do without it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "moestream/geometry.h"
#include "moestream/registry.h"

namespace moestream {

class PageSource {
  public:
    virtual ~PageSource() = default;
    // A shard's region has been reserved: the slabs' movable pages will appear inside it. Throws Error.
    virtual void region(char* /*base*/, uint32_t /*shard*/) {}
    // Memory for `frames` frames of `frame_bytes` of one part; where each lies until its first use, or nulls where
    // pages are only had when they are needed. Throws Error(refused).
    virtual std::vector<char*> frames(uint32_t frames, size_t frame_bytes) = 0;
    // Gives `to` its pages: those at `from` (an evicted slab's, or a frame's first place), or new ones (null).
    // `restore`: keep the number of mappings bounded. 0 or errno.
    virtual int supply(char* from, char* to, size_t bytes, bool restore) = 0;
    // Gives the pages at `at` back to the system; the range stays reserved. 0 or errno.
    int drop(char* at, size_t bytes);
    virtual std::map<std::string, uint64_t> counts() const;

  protected:
    uint64_t moved_ = 0, dropped_ = 0, populated_ = 0;  // bytes
};

struct PageSourceOptions {
    const SlabIndex* index = nullptr;
    const Geometry* geometry = nullptr;
    std::function<void(const std::string&)> fallback;
};
using PageSourceFactory = std::function<std::unique_ptr<PageSource>(const PageSourceOptions&)>;
using PageSourceRegistration = Registration<PageSourceFactory>;
// "recycle", "fresh", "populate", "thp". Throws Error(usage), Error(refused).
std::unique_ptr<PageSource> make_page_source(const std::string& text, const PageSourceOptions& options);

}  // namespace moestream
