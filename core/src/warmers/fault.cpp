// fault: nothing; the matmul's own page faults bring the bytes. Stock llama.cpp's way.
#include "../stores/warmer.h"

namespace moestream {
namespace {

struct Fault : Warmer {
    Trouble warm(std::span<MappedSlab>) override { return {}; }
    std::map<std::string, uint64_t> counts() const override { return {}; }
};

const WarmerRegistration registration("fault", "nothing: page faults bring the bytes, as in stock llama.cpp",
                                      [](const WarmerOptions& options, const std::string& argument) {
                                          expect_no_argument("fault", argument);
                                          no_scratch("fault", options);
                                          return std::make_unique<Fault>();
                                      });

}  // namespace
}  // namespace moestream
