#include "moestream/engine.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <string_view>
#include <utility>

#include "moestream/geometry.h"

namespace moestream {
namespace {

constexpr std::string_view kTopk = "ffn_moe_topk-";
constexpr std::string_view kLogits = "ffn_moe_logits-";

// The layer in a node's name, or -1.
int32_t layer_of(const char* name, std::string_view prefix) {
    if (std::strncmp(name, prefix.data(), prefix.size()) != 0) return -1;
    const char* digits = name + prefix.size();
    int32_t layer = -1;
    const auto [end, error] = std::from_chars(digits, name + 64, layer);
    return error == std::errc() && *end == '\0' ? layer : -1;
}

// Do two nodes hold the same choice of experts?
bool same_ids(const abi::Tensor* a, const abi::Tensor* b) {
    if (a == b) return true;
    return a != nullptr && b != nullptr && a->data == b->data && a->nb[1] == b->nb[1] &&
           std::equal(a->ne, a->ne + abi::kMaxDims, b->ne);
}

LoadScope::File identify(const Shard& shard) {
    struct stat status {};
    if (stat(shard.path.c_str(), &status) != 0) {
        throw Error(ErrorKind::refused, shard.path + ": " + std::strerror(errno));
    }
    if (static_cast<uint64_t>(status.st_size) != shard.bytes) {
        throw Error(ErrorKind::refused, shard.path + " has changed since its header was read: load it again");
    }
    return {status.st_dev, status.st_ino};
}

}  // namespace

Engine::Engine(SlabIndex index, EngineOptions options)
    : index_(std::move(index)), options_(std::move(options)), ops_(abi::prove(options_.libllama)),
      store_(make_store(options_.store, index_, options_.store_options)), seen_(index_.banks().size()) {
    std::string argument;
    predictor_ = Registry<PredictorFactory>::instance().find(options_.predictor, argument)(
        index_, ops_, argument, options_.store_options.seeds);
    options_.optional_banks.resize(index_.banks().size());
    chunks_of_.resize(index_.banks().size(), kNone);
    uint32_t widest = 0;
    for (uint32_t b = 0; b < index_.banks().size(); ++b) {
        const auto& bank = index_.banks()[b];
        widest = std::max(widest, bank.count);
        const auto layer = static_cast<size_t>(bank.layer);
        if (bank_of_layer_.size() <= layer) bank_of_layer_.resize(layer + 1, kNone);
        // A second bank of a layer (chunk experts) has a second choice we do not follow: it is read whole, there.
        if (bank_of_layer_[layer] == kNone) {
            bank_of_layer_[layer] = b;
        } else {
            chunks_of_[bank_of_layer_[layer]] = b;
            options_.optional_banks[b] = true;
        }
    }
    count_.resize(widest);
    routed_.reserve(widest);
    wish_.reserve(widest);
}

Engine::~Engine() = default;

const Store& Engine::store() const {
    if (store_ == nullptr) throw Error(ErrorKind::usage, "this engine is closed");
    return *store_;
}

void Engine::close() {
    scope_.reset();
    predictor_.reset();
    store_.reset();
    recorder_.reset();
}

void Engine::start_trace() {
    store();
    recorder_ = std::make_unique<Recorder>(index_.experts(), kSlots);
    store_->record_to(recorder_.get());
}

Recorder::Taken Engine::take_trace(bool finish) {
    if (recorder_ == nullptr) throw Error(ErrorKind::usage, "no trace has been started");
    return recorder_->take(finish);
}

void Engine::begin_load() {
    std::vector<LoadScope::File> files;
    for (const auto& shard : index_.shards()) {
        files.push_back(identify(shard));
        for (const auto& mapping : find_mappings(files.back())) mapped_before_.push_back(mapping.base);
    }
    if (!options_.interpose || !install_slots(options_.libllama)) {
        options_.store_options.fallback("llama.cpp's own mapping is used, which reads the whole file at load: "
                                        "no import slot of mmap was found in " + options_.libllama);
        return;
    }
    scope_ = std::make_unique<LoadScope>(std::move(files), [this](uint32_t shard) -> void* {
        try {
            void* base = store_->region(shard);
            if (base != MAP_FAILED) store_->load_dense();
            return base;
        } catch (...) {
            load_error_ = std::current_exception();
            errno = EIO;
            return MAP_FAILED;
        }
    });
}

void Engine::end_load(bool loaded) {
    const auto scope = std::move(scope_);
    if (load_error_ != nullptr) std::rethrow_exception(std::exchange(load_error_, nullptr));
    if (!loaded) return;
    for (uint32_t s = 0; s < index_.shards().size(); ++s) {
        if (scope != nullptr && scope->answered()[s]) continue;
        const auto mappings = find_mappings(identify(index_.shards()[s]));
        const auto mapping = std::find_if(mappings.begin(), mappings.end(), [&](const Mapping& m) {
            return std::find(mapped_before_.begin(), mapped_before_.end(), m.base) == mapped_before_.end();
        });
        if (mapping == mappings.end()) {
            throw Error(ErrorKind::internal, "llama.cpp did not map " + index_.shards()[s].path +
                                                 ": streaming needs use_mmap=True and no GPU layers");
        }
        store_->adopt(s, *mapping);
    }
    store_->load_dense();
    if (failure()) throw Error(ErrorKind::io, failure()->what);
}

void Engine::set_budget(const std::vector<uint32_t>& capacities, uint64_t growth_limit) {
    store();
    store_->limit_growth(growth_limit);
    store_->set_capacities(capacities);
}

std::vector<uint32_t> Engine::resize(const std::vector<uint32_t>& capacities) {
    store();
    return store_->resize(capacities);
}

const std::optional<Failure>& Engine::failure() const {
    return failure_ || store_ == nullptr ? failure_ : store_->failure();
}

void Engine::clear_failure() {
    failure_.reset();
    if (store_ != nullptr) store_->clear_failure();
}

void Engine::fail(std::string what) {
    if (!failure_) failure_ = Failure{0, std::move(what)};
}

void Engine::begin_step() {
    if (store_ != nullptr) store_->begin_step();
    ids_ = nullptr;
    logits_ = nullptr;
    bank_ = kNone;
    whole_ = false;
    unseen_ = false;
    uncomputed_ = kNone;
    last_bank_ = kNone;
    pass_tokens_ = 0;
    wish_.clear();
    std::fill(seen_.begin(), seen_.end(), 0);
}

void Engine::end_step() {
    if (store().streams() && !failure() && !cancelled_) check_pass();
    store_->end_step();
    token_ += pass_tokens_;
    pass_tokens_ = 0;
}

void Engine::begin_pass(uint32_t bank, uint32_t tokens) {
    if (last_bank_ != kNone && bank > last_bank_) return;
    if (last_bank_ != kNone) check_pass();
    token_ += pass_tokens_;
    pass_tokens_ = tokens;
    std::fill(seen_.begin(), seen_.end(), 0);
}

// A bank without a route would be computed on whatever bytes its pages last held.
void Engine::check_pass() {
    for (uint32_t b = 0; b < seen_.size(); ++b) {
        if (seen_[b] == 1 || options_.optional_banks[b]) continue;
        fail("layer " + std::to_string(index_.banks()[b].layer) + " was routed " + std::to_string(seen_[b]) +
             " times in one pass, not once: this llama.cpp routes in a way this engine does not see");
        return;
    }
}

bool Engine::on_abort(void* engine) {
    const auto& self = *static_cast<const Engine*>(engine);
    return self.cancelled_.load(std::memory_order_relaxed) || self.failure().has_value();
}

bool Engine::on_node(abi::Tensor* node, bool ask, void* engine) {
    auto& self = *static_cast<Engine*>(engine);
    // Not false after a node: the scheduler would end the split there and call the decode a success.
    if (self.store_ == nullptr || !self.store_->streams() || self.failure().has_value()) return !ask;
    // Nothing may be thrown through llama.cpp's frames: the abort callback carries the failure out.
    try {
        if (ask) return self.ask(*node);
        self.uncomputed_ = kNone;
        self.computed(*node);
    } catch (const std::exception& error) {
        self.fail(error.what());
    }
    return !ask;
}

bool Engine::ask(const abi::Tensor& node) {
    if (node.op == ops_.mul_mat_id) return ask_matmul(node);
    if (node.name[0] != 'f') return false;
    if (layer_of(node.name, kLogits) >= 0) logits_ = &node;
    const int32_t layer = layer_of(node.name, kTopk);
    if (layer < 0 || static_cast<size_t>(layer) >= bank_of_layer_.size()) return false;
    return bank_of_layer_[layer] != kNone;
}

// Where a layer has chunk experts beside the routed ones, the second choice of a pass is theirs.
bool Engine::chooses_chunks(uint32_t bank) const {
    return chunks_of_[bank] != kNone && seen_[bank] != 0 && last_bank_ == bank;
}

void Engine::computed(const abi::Tensor& node) {
    const int32_t layer = layer_of(node.name, kTopk);
    if (layer < 0) return;
    unseen_ = false;
    const uint32_t bank = bank_of_layer_[layer];
    // Here and not at its matmul: pages may move only when what was asked about before has been computed.
    if (chooses_chunks(bank)) return static_cast<void>(route_all(chunks_of_[bank]));
    const auto& shape = index_.banks()[bank];
    if (node.type != abi::kTypeI32 || node.data == nullptr) return fail(std::string(node.name) + " holds no ids");
    const auto tokens = static_cast<uint32_t>(node.ne[1]);
    begin_pass(bank, tokens);
    last_bank_ = bank;
    ++seen_[bank];
    ++routes_;
    routed_.clear();
    wish_.clear();
    wished_ = false;
    // A row of ids is a view into a wider row (a full sort): its stride is nb[1], not k * 4.
    for (int64_t row = 0; row < node.ne[1]; ++row) {
        const auto* ids = reinterpret_cast<const int32_t*>(static_cast<const char*>(node.data) + row * node.nb[1]);
        for (int64_t k = 0; k < node.ne[0]; ++k) {
            if (ids[k] < 0 || static_cast<uint32_t>(ids[k]) >= shape.count) return refuse_id(node, ids[k], shape.count);
            ++count_[ids[k]];
        }
    }
    if (recorder_ != nullptr) record_route(node, bank);
    // Ascending ids: file order, and the order in which the matmul walks its experts.
    for (uint32_t id = 0; id < shape.count; ++id) {
        if (count_[id] == 0) continue;
        routed_.push_back({shape.first_expert + id, count_[id]});
        count_[id] = 0;
    }
    bank_ = bank;
    whole_ = false;
    ids_ = &node;
    if (!store_->route(bank, routed_, token_, std::max(pass_tokens_, 1u))) return;
    const auto predicted = predictor_->predict({bank, routed_, node, logits_});
    wish_.assign(predicted.begin(), predicted.end());
    // A batch that wants most of a layer will want most of the next: read it in file order while this one computes.
    if (tokens > 1 && routed_.size() * 4 >= size_t{shape.count} * 3 && bank + 1 < index_.banks().size()) {
        const auto& next = index_.banks()[bank + 1];
        wish_.clear();
        for (uint32_t id = 0; id < next.count; ++id) wish_.push_back(next.first_expert + id);
    }
    logits_ = nullptr;
}

// The abort callback is asked only once a node more is computed, which ids of no expert would not outlive.
void Engine::refuse_id(const abi::Tensor& node, int32_t id, uint32_t experts) {
    for (int64_t row = 0; row < node.ne[1]; ++row) {
        std::fill_n(reinterpret_cast<int32_t*>(static_cast<char*>(node.data) + row * node.nb[1]), node.ne[0], 0);
    }
    std::fill(count_.begin(), count_.end(), 0);
    fail(std::string(node.name) + " names expert " + std::to_string(id) + " of " + std::to_string(experts));
}

void Engine::record_route(const abi::Tensor& node, uint32_t bank) {
    recorder_->route(bank, token_, pass_tokens_, static_cast<uint32_t>(node.ne[1]), static_cast<uint32_t>(node.ne[0]));
    for (int64_t row = 0; row < node.ne[1]; ++row) {
        const auto* ids = reinterpret_cast<const int32_t*>(static_cast<const char*>(node.data) + row * node.nb[1]);
        for (int64_t k = 0; k < node.ne[0]; ++k) recorder_->id(ids[k]);
    }
}

void Engine::pump() {
    if (wished_ || wish_.empty() || !store_->demand_idle()) return;
    wished_ = true;
    if (recorder_ != nullptr) recorder_->wish(wish_);
    store_->speculate(wish_);
}

// A route nobody told us of: the layer is read whole, if it fits.
bool Engine::route_all(uint32_t bank) {
    const auto& shape = index_.banks()[bank];
    routed_.clear();
    wish_.clear();
    for (uint32_t id = 0; id < shape.count; ++id) routed_.push_back({shape.first_expert + id, 1});
    bank_ = bank;
    whole_ = true;
    if (recorder_ != nullptr) {
        recorder_->route(bank, token_, std::max(pass_tokens_, 1u), 1, shape.count);
        for (uint32_t id = 0; id < shape.count; ++id) recorder_->id(static_cast<int32_t>(id));
    }
    return store_->route(bank, routed_, token_, std::max(pass_tokens_, 1u));
}

bool Engine::ask_matmul(const abi::Tensor& node) {
    const auto place = store_->place(node.src[0]->data);
    if (place.tensor == kNone) return false;
    if (bank_ != place.bank || !(whole_ || same_ids(node.src[2], ids_))) {
        // Making room for this bank now could take experts that the matmuls before this one are still to read.
        if (uncomputed_ != kNone && uncomputed_ != place.bank) {
            fail("layer " + std::to_string(index_.banks()[place.bank].layer) +
                 " multiplies experts that no route was seen of: this llama.cpp routes in a way this engine does not see");
            return false;
        }
        if (!route_all(place.bank)) return false;
        unseen_ = true;
    }
    uncomputed_ = place.bank;
    if (!store_->wait(place.tensor)) return false;
    pump();
    // The next bank will make room at its matmul too: nothing may be uncomputed then.
    if (unseen_) return true;
    // Cut behind this matmul only when another of the bank still waits for its bytes.
    const auto& tensors = index_.banks()[place.bank].tensors;
    return std::any_of(tensors.begin(), tensors.end(), [this](uint32_t tensor) { return store_->pending(tensor); });
}

}  // namespace moestream
