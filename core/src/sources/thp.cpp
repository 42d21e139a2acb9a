// thp: as fresh, the new pages huge where a slab holds a whole one. A huge page that reached into a neighbour would take
// memory that no budget counts, so only the aligned 2 MiB inside a slab are advised.
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "fresh.h"

namespace moestream {
namespace {

constexpr uint64_t kHuge = uint64_t{2} << 20;
constexpr const char* kSetting = "/sys/kernel/mm/transparent_hugepage/enabled";

class Thp : public FreshPages {
  public:
    explicit Thp(const PageSourceOptions& options) : options_(options) {
        std::string word;
        for (std::ifstream setting(kSetting); setting >> word;) {
            if (word == "[never]") {
                throw Error(ErrorKind::refused, std::string("arena/thp: huge pages are off: echo madvise > ") + kSetting);
            }
        }
    }

    void region(char* base, uint32_t shard) override {
        const auto& tensors = options_.index->tensors();
        for (uint32_t t = 0; t < tensors.size(); ++t) {
            if (tensors[t].shard != shard) continue;
            for (uint32_t id = 0; id < tensors[t].count; ++id) {
                const auto begin = reinterpret_cast<uintptr_t>(base) + options_.geometry->movable_offset(t, id);
                advise(begin, begin + options_.geometry->movable_bytes(t));
            }
        }
        if (advised_ == 0 && !told_ && options_.fallback) {
            told_ = true;
            options_.fallback("arena/thp: no slab of this model holds a whole 2 MiB page: small pages as with fresh");
        }
    }
    std::map<std::string, uint64_t> counts() const override {
        auto counts = FreshPages::counts();
        counts["bytes in huge pages at most"] = advised_;
        return counts;
    }

  private:
    void advise(uintptr_t begin, uintptr_t end) {
        begin = (begin + kHuge - 1) / kHuge * kHuge;
        end = end / kHuge * kHuge;
        if (begin >= end) return;
        if (madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) != 0) {
            throw Error(ErrorKind::refused, std::string("arena/thp: MADV_HUGEPAGE is refused (") +
                                                std::strerror(errno) +
                                                "): see " + kSetting);
        }
        advised_ += end - begin;
    }

    PageSourceOptions options_;
    uint64_t advised_ = 0;
    bool told_ = false;
};

const PageSourceRegistration registration("thp", "as fresh, in transparent huge pages",
                                          [](const PageSourceOptions& options) {
                                              return std::make_unique<Thp>(options);
                                          });

}  // namespace
}  // namespace moestream
