#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bind.h"
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

nb::object failure(const Engine& engine) {
    const auto& failed = engine.failure();
    if (!failed) return nb::none();
    return nb::make_tuple(failed->error, failed->what);
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
               bool direct, bool interpose, std::function<void(const std::string&)> fallback,
               std::function<void(uint64_t, uint64_t)> progress) {
                EngineOptions options;
                options.libllama = std::move(libllama);
                options.store = std::move(store);
                options.predictor = std::move(predictor);
                options.interpose = interpose;
                options.optional_banks = optional_banks;
                options.store_options = {std::move(reader), std::move(policy), std::move(dense),
                                         direct,            std::move(fallback), std::move(progress)};
                new (self) Engine(make_index(shards, tensors, layers), std::move(options));
            },
            nb::kw_only(), nb::arg("shards"), nb::arg("tensors"), nb::arg("layers"), nb::arg("optional_banks"),
            nb::arg("libllama"), nb::arg("store"), nb::arg("reader"), nb::arg("policy"), nb::arg("predictor"),
            nb::arg("dense"), nb::arg("direct"), nb::arg("interpose"), nb::arg("fallback"), nb::arg("progress"))
        .def("begin_load", &Engine::begin_load)
        .def("end_load", &Engine::end_load, nb::arg("loaded"))
        .def("set_capacities", &Engine::set_capacities, nb::call_guard<nb::gil_scoped_release>())
        .def("begin_step", &Engine::begin_step)
        .def("end_step", &Engine::end_step)
        .def("cancel", &Engine::cancel, nb::arg("on"))
        .def("clear_failure", &Engine::clear_failure)
        .def_prop_ro("failure", &failure)
        .def_prop_ro("counters", &counters)
        .def_prop_ro("streams", [](const Engine& engine) { return engine.store().streams(); })
        .def_prop_ro("address", [](const Engine& engine) { return reinterpret_cast<uintptr_t>(&engine); })
        .def_prop_ro_static("node_callback",
                            [](nb::handle) { return reinterpret_cast<uintptr_t>(&Engine::on_node); })
        .def_prop_ro_static("abort_callback",
                            [](nb::handle) { return reinterpret_cast<uintptr_t>(&Engine::on_abort); });
    m.def("geometry", &geometry, nb::arg("shards"), nb::arg("tensors"), nb::arg("layers"));
    m.def("prove_abi", [](const std::string& libllama) { abi::prove(libllama); }, nb::arg("libllama"));
    m.def("store_members", &members<StoreFactory>);
    m.def("reader_members", &members<ReaderFactory>);
    m.def("predictor_members", &members<PredictorFactory>);
}
