// pread:TxS: each routed slab is read into scratch by T threads in S pieces, which leaves it in the page cache under the
// mapping. pread+willneed:TxS: advice for all of the route first, so the kernel has it in flight while pread copies.
#include "pieces.h"

namespace moestream {
namespace {

class Pread : public PieceWarmer {
  public:
    Pread(const WarmerOptions& options, CrewShape shape, bool advise) : PieceWarmer(options, shape), advise_(advise) {}

    Trouble warm(std::span<MappedSlab> slabs) override {
        for (size_t i = 0; advise_ && i < slabs.size(); ++i) {
            const int error = advise_willneed(slabs[i].address, slabs[i].bytes);
            if (error != 0) return {error, slabs[i]};
            ++advised_;
        }
        return PieceWarmer::warm(slabs);
    }
    std::map<std::string, uint64_t> counts() const override {
        std::map<std::string, uint64_t> counts{{"preads", done_pieces()}};
        if (advise_) counts["advice calls"] = advised_;
        if (huge_bytes() > 0) counts["huge scratch bytes"] = huge_bytes();
        return counts;
    }

  private:
    int piece(const MappedSlab& slab, uint64_t begin, uint64_t bytes, const Scratch& scratch) override {
        return scratch.read_through(slab.fd, slab.offset + begin, bytes);
    }

    bool advise_;
    std::atomic<uint64_t> advised_{0};
};

const WarmerRegistration plain("pread", "pread of each routed slab into scratch, to warm the page cache",
                               [](const WarmerOptions& options, const std::string& argument) {
                                   return std::make_unique<Pread>(options, parse_crew(argument), false);
                               });
const WarmerRegistration advised("pread+willneed", "MADV_WILLNEED, then pread of each routed slab into scratch",
                                 [](const WarmerOptions& options, const std::string& argument) {
                                     return std::make_unique<Pread>(options, parse_crew(argument), true);
                                 });

}  // namespace
}  // namespace moestream
