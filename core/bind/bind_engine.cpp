#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "arrays.h"
#include "../src/stores/warmer.h"
#include "bind.h"
#include "moestream/abilities.h"
#include "moestream/engine.h"
#include "moestream/geometry.h"
#include "moestream/reader.h"

namespace nb = nanobind;
using namespace moestream;

namespace {

using ShardRow = std::tuple<std::string, uint64_t>;
// name, bank, shard, offset, slab_bytes, count
using TensorRow = std::tuple<std::string, uint32_t, uint32_t, uint64_t, uint64_t, uint32_t>;

SlabIndex make_index(const std::vector<ShardRow>& shards, const std::vector<TensorRow>& tensors,
                     const std::vector<int32_t>& layers) {
    std::vector<Shard> shard_list;
    for (const auto& [path, bytes] : shards) shard_list.push_back({path, bytes});
    std::vector<ExpertTensor> tensor_list;
    for (const auto& [name, bank, shard, offset, slab_bytes, count] : tensors) {
        tensor_list.push_back({name, bank, shard, offset, slab_bytes, count});
    }
    return SlabIndex(std::move(shard_list), std::move(tensor_list), layers);
}

nb::dict counters(const Engine& engine) {
    const StoreCounters c = engine.store().counters();
    nb::dict result;
    result["hits"] = c.hits;
    result["misses"] = c.misses;
    result["bytes"] = c.bytes;
    result["dense_bytes"] = c.dense_bytes;
    result["stall_ns"] = c.stall_ns;
    result["memory_ns"] = c.memory_ns;
    result["speculative_issued"] = c.speculative_issued;
    result["speculative_used"] = c.speculative_used;
    result["speculative_wasted_bytes"] = c.speculative_wasted_bytes;
    result["routes"] = engine.routes();
    result["tokens"] = engine.tokens();
    return result;
}

template <class T, class Field>
nb::ndarray<nb::numpy, T, nb::ndim<1>> column(const std::vector<SlabEvent>& events, Field SlabEvent::* field) {
    std::vector<T> values(events.size());
    for (size_t i = 0; i < events.size(); ++i) values[i] = static_cast<T>(events[i].*field);
    return to_array(std::move(values));
}

nb::dict take_trace(Engine& engine, bool finish) {
    auto [routes, slabs] = engine.take_trace(finish);
    nb::dict result;
    result["bank"] = to_array(std::move(routes.bank));
    result["token"] = to_array(std::move(routes.token));
    result["tokens"] = to_array(std::move(routes.tokens));
    result["rows"] = to_array(std::move(routes.rows));
    result["k"] = to_array(std::move(routes.k));
    result["wishes"] = to_array(std::move(routes.wishes));
    result["ids"] = to_array(std::move(routes.ids));
    result["wish_ids"] = to_array(std::move(routes.wish_ids));
    result["slab_route"] = column<uint64_t>(slabs, &SlabEvent::route);
    result["slab_expert"] = column<uint32_t>(slabs, &SlabEvent::expert);
    result["slab_slot"] = column<uint8_t>(slabs, &SlabEvent::slot);
    result["slab_kind"] = column<uint8_t>(slabs, &SlabEvent::kind);
    result["slab_bytes"] = column<uint64_t>(slabs, &SlabEvent::bytes);
    result["slab_issued_ns"] = column<uint64_t>(slabs, &SlabEvent::issued_ns);
    result["slab_ready_ns"] = column<uint64_t>(slabs, &SlabEvent::ready_ns);
    result["slab_needed_ns"] = column<uint64_t>(slabs, &SlabEvent::needed_ns);
    result["slab_waited_ns"] = column<uint64_t>(slabs, &SlabEvent::waited_ns);
    return result;
}

template <class T>
std::vector<T> to_vector(nb::handle object) {
    const auto array = nb::cast<nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>>(object);
    return {array.data(), array.data() + array.size()};
}

// A dict as moestream.seeds makes it: 'priority'; 'ridge' (a list by bank of (inputs, weights, bias) or None) and
// 'ridge_wishes'; 'oracle_experts' and 'oracle_start'. None, and what is left out, is no seed.
Seeds make_seeds(nb::object object) {
    Seeds seeds;
    if (object.is_none()) return seeds;
    const auto dict = nb::cast<nb::dict>(object);
    if (dict.contains("priority")) seeds.priority = to_vector<double>(dict["priority"]);
    if (dict.contains("ridge")) {
        for (nb::handle item : nb::cast<nb::list>(dict["ridge"])) {
            auto& linear = seeds.ridge.emplace_back();
            if (item.is_none()) continue;
            const auto parts = nb::cast<nb::tuple>(item);
            linear.inputs = nb::cast<uint32_t>(parts[0]);
            linear.weights = to_vector<float>(parts[1]);
            linear.bias = to_vector<float>(parts[2]);
        }
    }
    if (dict.contains("ridge_wishes")) seeds.ridge_wishes = nb::cast<uint32_t>(dict["ridge_wishes"]);
    if (dict.contains("oracle_experts")) seeds.oracle_experts = to_vector<uint32_t>(dict["oracle_experts"]);
    if (dict.contains("oracle_start")) seeds.oracle_start = to_vector<uint64_t>(dict["oracle_start"]);
    return seeds;
}

nb::object failure(const Engine& engine) {
    const auto& failed = engine.failure();
    if (!failed) return nb::none();
    return nb::make_tuple(failed->error, failed->what, failed->dense_at);
}

nb::dict geometry(const std::vector<ShardRow>& shards, const std::vector<TensorRow>& tensors,
                  const std::vector<int32_t>& layers) {
    const SlabIndex index = make_index(shards, tensors, layers);
    const Geometry geometry(index);
    nb::list parts;
    for (const auto& part : geometry.parts()) parts.append(nb::make_tuple(part.banks, part.pages, part.frame_pages));
    uint64_t resident = 0;
    for (uint32_t s = 0; s < index.shards().size(); ++s) {
        for (const auto& range : geometry.resident(s)) resident += range.end - range.begin;
    }
    nb::dict result;
    result["parts"] = parts;
    result["resident_bytes"] = resident;
    return result;
}

template <class Factory>
nb::dict members() {
    nb::dict result;
    for (const auto& [name, member] : Registry<Factory>::instance().members()) result[name.c_str()] = member.help;
    return result;
}

}  // namespace

void bind_engine(nb::module_& m) {
    nb::class_<Engine>(m, "Engine", "One model's store and hook; see moestream/engine.h.")
        .def(
            "__init__",
            [](Engine* self, const std::vector<ShardRow>& shards, const std::vector<TensorRow>& tensors,
               const std::vector<int32_t>& layers, const std::vector<bool>& optional_banks, std::string libllama,
               std::string store, std::string reader, std::string policy, std::string predictor, std::string dense,
               bool direct, bool keep_cached, std::string advice, std::string pages, uint64_t max_mappings, bool closed,
               uint64_t alignment, bool huge,
               std::string copy_dir, nb::object seeds, bool interpose,
               std::function<void(const std::string&)> fallback, std::function<void(uint64_t, uint64_t)> progress) {
                EngineOptions options;
                options.libllama = std::move(libllama);
                options.store = std::move(store);
                options.predictor = std::move(predictor);
                options.interpose = interpose;
                options.optional_banks = optional_banks;
                auto& store_options = options.store_options;
                store_options.reader = std::move(reader);
                store_options.policy = std::move(policy);
                store_options.dense = std::move(dense);
                store_options.direct = direct;
                store_options.keep_cached = keep_cached;
                store_options.advice = std::move(advice);
                store_options.pages = std::move(pages);
                store_options.max_mappings = max_mappings;
                store_options.closed = closed;
                store_options.alignment = alignment;
                store_options.huge = huge;
                store_options.speculative = options.predictor != "none";
                store_options.copy_dir = std::move(copy_dir);
                store_options.seeds = make_seeds(seeds);
                store_options.fallback = std::move(fallback);
                store_options.progress = std::move(progress);
                new (self) Engine(make_index(shards, tensors, layers), std::move(options));
            },
            nb::kw_only(), nb::arg("shards"), nb::arg("tensors"), nb::arg("layers"), nb::arg("optional_banks"),
            nb::arg("libllama"), nb::arg("store"), nb::arg("reader"), nb::arg("policy"), nb::arg("predictor"),
            nb::arg("dense"), nb::arg("direct"), nb::arg("keep_cached") = false, nb::arg("advice") = "normal", nb::arg("pages") = "recycle",
            nb::arg("max_mappings"), nb::arg("closed") = false, nb::arg("alignment") = kPage, nb::arg("huge") = false,
            nb::arg("copy_dir") = "", nb::arg("seeds") = nb::none(), nb::arg("interpose"), nb::arg("fallback"), nb::arg("progress"))
        .def("begin_load", &Engine::begin_load)
        .def("end_load", &Engine::end_load, nb::arg("loaded"))
        .def("set_budget", &Engine::set_budget, nb::kw_only(), nb::arg("capacities"), nb::arg("growth_limit"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("resize", &Engine::resize, nb::arg("capacities"), nb::call_guard<nb::gil_scoped_release>())
        .def("begin_step", &Engine::begin_step)
        .def("end_step", &Engine::end_step)
        .def("cancel", &Engine::cancel, nb::arg("on"))
        .def("clear_failure", &Engine::clear_failure)
        .def("close", &Engine::close, "Let go of the store; llama.cpp's model must be gone. Idempotent.")
        .def("start_trace", &Engine::start_trace, "Record what a trace needs from now on.")
        .def("take_trace", &take_trace, nb::arg("finish") = false,
             "What was recorded since the last call, as flat arrays; see moestream.trace.Events.")
        .def_prop_ro("engagement", [](const Engine& engine) { return engine.store().engagement(); },
                     "How often each thing the mechanism promises was done, by name.")
        .def_prop_ro("failure", &failure,
                     "None, or (errno, text, place): (shard, offset) of bytes that are no expert's, else None.")
        .def_prop_ro("counters", &counters)
        .def_prop_ro("streams", [](const Engine& engine) { return engine.store().streams(); })
        .def_prop_ro("address", [](const Engine& engine) { return reinterpret_cast<uintptr_t>(&engine); })
        .def_prop_ro_static("node_callback",
                            [](nb::handle) { return reinterpret_cast<uintptr_t>(&Engine::on_node); })
        .def_prop_ro_static("abort_callback",
                            [](nb::handle) { return reinterpret_cast<uintptr_t>(&Engine::on_abort); });
    m.def("geometry", &geometry, nb::arg("shards"), nb::arg("tensors"), nb::arg("layers"));
    m.def("abilities", &abilities, "What members need of this kernel, tried: by name '' or one line that says why not.");
    m.def("startable_threads", &startable_threads, nb::arg("count"), nb::call_guard<nb::gil_scoped_release>(),
          "How many of so many threads this process can start now, beside those it has: each is started, and ends.");
    m.def("prove_abi", [](const std::string& libllama) { abi::prove(libllama); }, nb::arg("libllama"));
    m.def("store_members", &members<StoreFactory>);
    m.def("reader_members", &members<ReaderFactory>);
    m.def("warmer_members", &members<WarmerFactory>);
    m.def("predictor_members", &members<PredictorFactory>);
}
