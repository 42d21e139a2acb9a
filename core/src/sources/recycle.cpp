// recycle: a pool of huge pages taken at start; an evicted slab's pages are moved to the loaded one by mremap. No copy, no
// zeroing, no fault. A frame whose pages were dropped gets new ones from the read's own faults.
#include <list>

#include "../stores/page_source.h"
#include "../stores/pages.h"

namespace moestream {
namespace {

class Recycle : public PageSource {
  public:
    Recycle() {
        if (const std::string why = move_refused(); !why.empty()) throw Error(ErrorKind::unsupported, why);
    }
    std::vector<char*> frames(uint32_t frames, size_t frame_bytes) override {
        const auto& pool = pools_.emplace_back(frame_bytes * frames);
        std::vector<char*> places;
        for (uint32_t f = 0; f < frames; ++f) places.push_back(pool.base() + f * frame_bytes);
        return places;
    }
    int supply(char* from, char* to, size_t bytes, bool restore) override {
        if (from == nullptr) return 0;
        moved_ += bytes;
        return move_pages(from, to, bytes, restore);
    }

  private:
    std::list<PagePool> pools_;
};

const PageSourceRegistration registration("recycle", "an evicted expert's pages are moved by mremap",
                                          [](const PageSourceOptions&) { return std::make_unique<Recycle>(); });

}  // namespace
}  // namespace moestream
