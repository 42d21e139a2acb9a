// Pages that are dropped at eviction and had anew at the next read: what `fresh`, `populate` and `thp` have in common.
#pragma once
#include "../stores/page_source.h"

namespace moestream {

class FreshPages : public PageSource {
  public:
    std::vector<char*> frames(uint32_t frames, size_t) override { return std::vector<char*>(frames, nullptr); }
    int supply(char* from, char*, size_t bytes, bool) override { return from == nullptr ? 0 : drop(from, bytes); }
};

}  // namespace moestream
