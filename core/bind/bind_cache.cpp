// The cache's decisions for Python: replay and the tests drive the engine's own ExpertCache through this.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.h"
#include "moestream/cache.h"

namespace nb = nanobind;

namespace moestream {
namespace {

using PartSpec = std::pair<std::vector<uint32_t>, uint32_t>;
using Counts = std::vector<std::pair<uint32_t, uint32_t>>;  // (expert, tokens that chose it)
using Move = std::tuple<uint32_t, std::optional<uint32_t>>;

Move to_move(const Load& load) {
    return {load.expert, load.victim == kNone ? std::nullopt : std::optional<uint32_t>(load.victim)};
}

void check_expert(const ExpertCache& cache, uint32_t expert) {
    if (expert >= cache.experts())
        throw Error(ErrorKind::usage, "expert " + std::to_string(expert) + " of " + std::to_string(cache.experts()));
}

// The core takes a route's shape on trust, its caller being the hook; what comes from Python is checked.
std::vector<RoutedExpert> to_route(const ExpertCache& cache, const Counts& experts) {
    std::vector<RoutedExpert> route;
    std::vector<uint32_t> seen;
    for (const auto& [expert, count] : experts) {
        check_expert(cache, expert);
        if (cache.bank_of(expert) != cache.bank_of(experts.front().first))
            throw Error(ErrorKind::usage, "a route's experts belong to one bank");
        if (count == 0) throw Error(ErrorKind::usage, "a routed expert's count is at least 1");
        route.push_back({expert, count});
        seen.push_back(expert);
    }
    std::sort(seen.begin(), seen.end());
    if (std::adjacent_find(seen.begin(), seen.end()) != seen.end())
        throw Error(ErrorKind::usage, "a route names each expert once");
    return route;
}

std::optional<std::vector<Move>> route(ExpertCache& cache, const Counts& experts, uint64_t token, uint32_t tokens) {
    if (tokens == 0) throw Error(ErrorKind::usage, "a step has at least 1 token");
    std::vector<Load> loads;
    if (!cache.route(to_route(cache, experts), token, tokens, loads)) return std::nullopt;
    std::vector<Move> moves(loads.size());
    std::transform(loads.begin(), loads.end(), moves.begin(), to_move);
    return moves;
}

std::optional<Move> speculate(ExpertCache& cache, uint32_t expert) {
    check_expert(cache, expert);
    Load load;
    return cache.speculate(expert, load) ? std::optional<Move>(to_move(load)) : std::nullopt;
}

const char* residency(const ExpertCache& cache, uint32_t expert) {
    check_expert(cache, expert);
    switch (cache.residency(expert)) {
        case Residency::absent: return "absent";
        case Residency::resident: return "resident";
        case Residency::speculative: return "speculative";
    }
    throw Error(ErrorKind::internal, "unknown residency");
}

std::map<std::string, std::string> policy_members() {
    std::map<std::string, std::string> help;
    for (const auto& [name, member] : Registry<PolicyFactory>::instance().members()) help[name] = member.help;
    return help;
}

void make_cache(ExpertCache* self, const std::vector<PartSpec>& parts, std::vector<uint32_t> bank_of,
                const std::string& policy, const std::vector<double>& priority) {
    std::vector<ExpertCache::Part> out;
    for (const auto& [experts, capacity] : parts) out.push_back({experts, capacity});
    new (self) ExpertCache(std::move(out), std::move(bank_of), policy, priority);
}

}  // namespace
}  // namespace moestream

using namespace moestream;

nb::dict to_dict(const CacheCounters& c) {
    nb::dict out;
    out["hits"] = c.hits;
    out["misses"] = c.misses;
    out["evictions"] = c.evictions;
    out["speculative_issued"] = c.speculative_issued;
    out["speculative_used"] = c.speculative_used;
    out["speculative_wasted"] = c.speculative_wasted;
    return out;
}

void bind_cache(nb::module_& m) {
    nb::class_<ExpertCache>(m, "ExpertCache", "Which experts are in memory and who leaves: decisions, no bytes.")
        .def("__init__", &make_cache, nb::arg("parts"), nb::arg("bank_of"), nb::arg("policy"),
             nb::arg("priority") = std::vector<double>(),
             "parts: (experts ascending, capacity in experts) each; bank_of: per expert; policy: 'lfu-decay:16'; "
             "priority: a seed for policies that take one, per expert.")
        .def("route", &route, nb::arg("experts"), nb::arg("token"), nb::arg("tokens"),
             "One route of (expert, count) of one bank: the (expert, victim or None) to load; None: too wide.")
        .def("speculate", &speculate, nb::arg("expert"),
             "Load an absent expert early: (expert, victim or None), or None when that may not be.")
        .def("release_speculative", &ExpertCache::release_speculative, nb::arg("bank"),
             "The bank has been routed: its unused early loads are no longer protected.")
        .def("cancel", [](ExpertCache& cache, uint32_t expert) { check_expert(cache, expert), cache.cancel(expert); },
             nb::arg("expert"), "Take back an early load that was never started.")
        .def("drop", [](ExpertCache& cache, uint32_t expert) { check_expert(cache, expert), cache.drop(expert); },
             nb::arg("expert"), "A resident expert leaves after its use; its frame becomes free.")
        .def(
            "set_capacity",
            [](ExpertCache& cache, uint32_t part, uint32_t capacity) {
                if (part >= cache.parts().size()) throw Error(ErrorKind::usage, "cache: there is no such part");
                std::vector<uint32_t> left;
                const uint32_t reached = cache.set_capacity(part, capacity, left);
                return std::pair{reached, left};
            },
            nb::arg("part"), nb::arg("capacity"), "Fewer experts, or again more: the capacity reached, and who left.")
        .def("unpin_route", &ExpertCache::unpin_route, "The last route's experts may leave.")
        .def("residency", &residency, nb::arg("expert"), "'absent', 'resident' or 'speculative'.")
        .def("keep",
             [](const ExpertCache& cache, uint32_t expert) { return check_expert(cache, expert), cache.keep(expert); },
             nb::arg("expert"), "Whether the policy lets the expert stay once its matmuls are over.")
        .def("counters", [](const ExpertCache& cache) { return to_dict(cache.counters()); },
              "Hits, misses, evictions and speculative loads since construction.");
    m.def("policy_members", &policy_members, "The policies by name, each with its one-line help.");
}
