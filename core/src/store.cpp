#include "moestream/store.h"

namespace moestream {

std::unique_ptr<Store> make_store(std::string_view text, const SlabIndex& index, const StoreOptions& options) {
    std::string argument;
    return Registry<StoreFactory>::instance().find(text, argument)(index, options);
}

}  // namespace moestream
