// Recorded routes through the cache, for Python: arrays in, arrays out.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bind.h"
#include "moestream/replay.h"

namespace nb = nanobind;
using namespace moestream;

namespace {

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using PartSpec = std::pair<std::vector<uint32_t>, uint32_t>;

template <class T>
std::span<const T> view(const In<T>& array) {
    return {array.data(), array.shape(0)};
}

nb::dict describe(const std::string& policy, Replayed&& done) {
    nb::dict out;
    out["policy"] = policy;
    out["counters"] = to_dict(done.counters);
    out["hits"] = to_array(std::move(done.hits));
    out["misses"] = to_array(std::move(done.misses));
    out["early"] = to_array(std::move(done.early));
    out["bytes"] = to_array(std::move(done.bytes));
    out["early_bytes"] = to_array(std::move(done.early_bytes));
    out["refused"] = to_array(std::move(done.refused));
    return out;
}

Replayed run(const std::vector<ExpertCache::Part>& parts, const std::vector<uint32_t>& bank_of,
             const std::string& policy, const std::vector<double>& priority, const RecordedRoutes& routes,
             const std::vector<uint64_t>& part_bytes, size_t counted_from) {
    check_routes(routes, bank_of);
    // Its constructor checks the parts, for both.
    const bool belady = policy == "belady";
    ExpertCache cache(parts, bank_of, belady ? "none" : policy, priority);
    if (part_bytes.size() != parts.size()) throw Error(ErrorKind::usage, "replay: part_bytes has one entry a part");
    if (!belady) return replay(cache, routes, part_bytes, counted_from);
    return replay_belady(parts, routes, cache.experts(), part_bytes, counted_from);
}

nb::dict replay_routes(const In<uint32_t>& bank, const In<uint64_t>& token, const In<uint32_t>& tokens, const In<uint64_t>& start,
                       const In<uint32_t>& experts, const In<uint32_t>& counts, const In<uint64_t>& wish_start,
                       const In<uint32_t>& wishes, const std::vector<PartSpec>& parts,
                       const std::vector<uint64_t>& part_bytes, const std::vector<uint32_t>& bank_of,
                       const std::string& policy, const std::vector<double>& priority, size_t counted_from) {
    std::vector<ExpertCache::Part> cached;
    for (const auto& [numbers, capacity] : parts) cached.push_back({numbers, capacity});
    const RecordedRoutes routes{view(bank),  view(start),  view(experts),    view(counts),
                                view(token), view(tokens), view(wish_start), view(wishes)};
    Replayed done(0);
    {
        nb::gil_scoped_release released;
        done = run(cached, bank_of, policy, priority, routes, part_bytes, counted_from);
    }
    return describe(policy, std::move(done));
}

}  // namespace

void bind_replay(nb::module_& m) {
    m.def("replay", &replay_routes, nb::kw_only(), nb::arg("bank"), nb::arg("token"), nb::arg("tokens"),
          nb::arg("start"), nb::arg("experts"), nb::arg("counts"), nb::arg("wish_start"), nb::arg("wishes"),
          nb::arg("parts"), nb::arg("part_bytes"), nb::arg("bank_of"), nb::arg("policy"), nb::arg("priority"),
          nb::arg("counted_from"),
          "Recorded routes through the engine's own cache, or past it by 'belady': the counters from route\n"
          "`counted_from` on, and for each route its hits, misses, early loads, their bytes and whether it was\n"
          "refused. wish_start may be empty: nothing is loaded early.");
}
