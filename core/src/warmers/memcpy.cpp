// memcpy:TxS: each routed slab is copied out of the mapping into scratch by T threads in S pieces: page faults bring the
// bytes, but here, in order and side by side, and not inside the matmul.
//
// A file that has shrunk under its mapping would end the process here; the store looks at its length before it asks.
#include <cstring>

#include "pieces.h"

namespace moestream {
namespace {

class Memcpy : public PieceWarmer {
  public:
    using PieceWarmer::PieceWarmer;

    std::map<std::string, uint64_t> counts() const override {
        std::map<std::string, uint64_t> counts{{"copies", done_pieces()}};
        if (huge_bytes() > 0) counts["huge scratch bytes"] = huge_bytes();
        return counts;
    }

  private:
    int piece(const MappedSlab& slab, uint64_t begin, uint64_t bytes, const Scratch& scratch) override {
        for (uint64_t at = 0; at < bytes; at += Scratch::kBytes) {
            std::memcpy(scratch.data(), slab.address + begin + at, std::min(Scratch::kBytes, bytes - at));
        }
        return 0;
    }
};

const WarmerRegistration registration("memcpy", "copies each routed slab out of the mapping, taking its faults there",
                                      [](const WarmerOptions& options, const std::string& argument) {
                                          return std::make_unique<Memcpy>(options, parse_crew(argument));
                                      });

}  // namespace
}  // namespace moestream
