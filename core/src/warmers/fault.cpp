// fault: nothing; the matmul's own page faults bring the bytes. Stock llama.cpp's way.
#include "../stores/warmer.h"

namespace moestream {
namespace {

struct Fault : Warmer {
    int warm(const MappedSlab&) override { return 0; }
};

const WarmerRegistration registration("fault", "nothing: page faults bring the bytes, as in stock llama.cpp",
                                      [](const std::string&) { return std::make_unique<Fault>(); });

}  // namespace
}  // namespace moestream
