// memcpy:TxS: each routed slab is copied out of the mapping into scratch by T threads in S pieces: page faults bring the
// bytes, but here, in order and side by side, and not inside the matmul.
//
// A file that has shrunk under its mapping would end the process here; so its length is looked at first, once a route.
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "pieces.h"

namespace moestream {
namespace {

class Memcpy : public PieceWarmer {
  public:
    using PieceWarmer::PieceWarmer;

    Outcome warm(std::span<const MappedSlab> slabs) override {
        for (size_t i = 0; i < slabs.size(); ++i) {
            if (i > 0 && slabs[i].fd == slabs[i - 1].fd && slabs[i].offset < slabs[i - 1].offset) continue;
            struct stat status {};
            if (fstat(slabs[i].fd, &status) != 0) return {errno, i, 0};
            if (static_cast<uint64_t>(status.st_size) < slabs[i].offset + slabs[i].bytes) return {ENODATA, i, 0};
        }
        return PieceWarmer::warm(slabs);
    }
    std::map<std::string, uint64_t> counts() const override {
        std::map<std::string, uint64_t> counts{{"copies", done()}};
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
