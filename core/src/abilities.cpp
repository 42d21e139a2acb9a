#include "moestream/abilities.h"

#include "moestream/error.h"
#include "readers/ring.h"
#include "stores/pages.h"
#include "warmers/residency.h"

namespace moestream {
namespace {

std::string ring_refused() {
    try {
        const Ring ring(1);
        return "";
    } catch (const Error& error) {
        return error.what();
    }
}

}  // namespace

std::map<std::string, std::string> abilities() {
    return {{"io_uring", ring_refused()},
            {"cachestat", cachestat_refused("/proc/self/exe")},
            {"mincore", mincore_refused()},
            {"mremap", move_refused()},
            {"populate", populate_refused()}};
}

}  // namespace moestream
