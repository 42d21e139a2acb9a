// uring:QD: O_DIRECT (or buffered) reads by io_uring, QD of them started at once.
#include "readers/uring.h"

#include "readers/ring.h"

namespace moestream {
namespace {

constexpr uint32_t kDefaultDepth = 8;
constexpr uint32_t kMaxDepth = 1024;

const ReaderRegistration registration(
    "uring", "io_uring, QD reads started at once, 1 to 1024 (default 8)",
    [](const ReaderOptions& options, const std::string& argument) {
        return std::make_unique<Uring<Ring>>(options, parse_count(argument, kDefaultDepth, kMaxDepth, "uring"));
    });

}  // namespace
}  // namespace moestream
