// A CUDA device that is not there: device type "cuda" on a CPU build of torch, for tests.
//
// Every operation runs at once, with the CPU's kernel on the same bytes. The card keeps book of what a real card would
// have done later and elsewhere:
// - Streams have vector clocks (Mattern 1989). An access to memory is a race where it meets one of another stream, one
//   of the two writes, and no event orders them.
// - A non_blocking copy between pinned memory and the card arrives only when something that waits for it asks for it.
//   Until then its target is NaN.
// - Memory that is freed while another stream uses it, without a record_stream, is an error.
// - Tensors of two devices in one call are an error, as is a generator of the other device.
// - Every place where the host waits for the card has a name in a list.
// torch.accelerator, torch.Stream and torch.Event work as they are; card.py gives torch.cuda its Python names.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <set>

namespace {
using namespace at;

// ---------------------------------------------------------------------------------- what the card knows

constexpr size_t MEMORY = size_t(24) << 30;
constexpr int CLOCKS = 33, HOST = 32;  // 32 streams, as torch's pool has, and the host
using Clock = std::array<uint64_t, CLOCKS>;

struct Range {
  char *begin = nullptr, *end = nullptr;
  bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
  bool holds(const Range& other) const { return begin <= other.begin && other.end <= end; }
};

struct Access {
  Range range;
  int stream;
  uint64_t time;
  bool writes;
  std::string what;
};

struct Block {  // of the card's memory, or of pinned memory
  size_t size;
  bool on_card;
  int stream;  // on which it was allocated
  size_t taken() const { return (size + 511) / 512 * 512; }  // CUDA's allocator hands out multiples of 512 bytes
  size_t pinned() const { return std::bit_ceil(size); }      // and its pinned memory comes in powers of two
  std::vector<Access> accesses;
  std::set<int> recorded;  // streams of record_stream
  Range range(char* begin) const { return {begin, begin + std::max<size_t>(size, 1)}; }
};

struct Copy {  // that has not arrived; the tensors are the CPU's views of the bytes
  Tensor to, from;
  Range written, read;
  int stream;
  uint64_t time;
  Clock behind;  // what comes before it
};

struct Moment {  // of a stream: what an event has recorded
  Clock clock;
  std::chrono::steady_clock::time_point at;
};

struct Card {
  std::recursive_mutex lock;
  std::map<char*, Block> blocks;
  std::deque<Copy> under_way;
  Clock clocks[CLOCKS]{};
  std::vector<std::string> errors, waits;
  bool may_wait = true;
  std::string planted;  // a fault, for the tests of this card itself
  int streams = 0;
  size_t held = 0, peak = 0;
  std::multiset<size_t> pinned, unused;  // pinned pieces in use, and freed ones that torch's allocator keeps
  bool explains = false;
  std::vector<int64_t> at_peak;  // bytes of each block that was held then
};

Card& card() {
  static Card* one = new Card;  // never destroyed: tensors outlive main
  return *one;
}

using Lock = std::lock_guard<std::recursive_mutex>;
thread_local int current = 0;  // the stream of this thread

void join(Clock& clock, const Clock& other) {
  for (int i = 0; i < CLOCKS; i++) clock[i] = std::max(clock[i], other[i]);
}

void report(const std::string& error) {  // each error once: a fault in a loop has thousands of places
  auto& known = card().errors;
  if (std::find(known.begin(), known.end(), error) == known.end()) known.push_back(error);
}

std::map<char*, Block>::iterator block_of(const void* address) {
  auto& blocks = card().blocks;
  auto found = blocks.upper_bound((char*)address);
  if (found == blocks.begin()) return blocks.end();
  --found;
  return (char*)address < found->second.range(found->first).end ? found : blocks.end();
}

Range range_of(const Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  int64_t last = 0;
  for (int i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
  auto& storage = tensor.unsafeGetTensorImpl()->storage();
  char* begin = (char*)storage.data() + tensor.storage_offset() * tensor.itemsize();
  return {begin, begin + (last + 1) * tensor.itemsize()};
}

// ---------------------------------------------------------------------------------- order and waiting

// Complete the copies for which this holds, and those that come before them, in their order.
template <class Condition>
void arrive(Condition holds) {
  std::vector<Copy> done, left;
  Clock before{};
  auto& queue = card().under_way;
  for (auto copy = queue.rbegin(); copy != queue.rend(); ++copy) {
    bool now = holds(*copy) || copy->time <= before[copy->stream];
    if (now) join(before, copy->behind);
    (now ? done : left).push_back(std::move(*copy));
  }
  // a tensor that is freed with a copy looks into the queue, so the queue is whole before that
  queue.assign(std::make_move_iterator(left.rbegin()), std::make_move_iterator(left.rend()));
  for (auto copy = done.rbegin(); copy != done.rend(); ++copy) copy->to.copy_(copy->from);
}

void host_waits(const Clock& until, const std::string& why) {
  if (!why.empty()) {
    card().waits.push_back(why);
    TORCH_CHECK(card().may_wait, "simcuda: the host waits for the card: ", why);
  }
  arrive([&](const Copy& copy) { return copy.time <= until[copy.stream]; });
  join(card().clocks[HOST], until);
}

// The time of an operation that the host gives to the current stream: behind all that the host has seen.
uint64_t launch() {
  auto& clock = card().clocks[current];
  join(clock, card().clocks[HOST]);
  return ++clock[current];
}

std::string told(bool writes, int stream) {
  return (writes ? " writes" : " reads") + std::string(" on stream ") + std::to_string(stream);
}

void find_races(const std::vector<Access>& accesses, const Access& now) {
  for (auto& before : accesses) {
    bool ordered = before.time <= card().clocks[now.stream][before.stream];
    if (!ordered && before.stream != now.stream && (before.writes || now.writes) && before.range.meets(now.range))
      report("race: " + now.what + told(now.writes, now.stream) + " what " + before.what +
             told(before.writes, before.stream) + ", and no event orders them");
  }
}

void touch(const Tensor& tensor, bool writes, const std::string& what, uint64_t time) {
  Access now{range_of(tensor), current, time, writes, what};
  auto found = now.range.begin ? block_of(now.range.begin) : card().blocks.end();
  if (found == card().blocks.end()) return;
  auto& accesses = found->second.accesses;
  find_races(accesses, now);
  const Clock& seen = card().clocks[current];
  arrive([&](const Copy& copy) {
    bool meets = copy.written.meets(now.range) || (writes && copy.read.meets(now.range));
    return meets && copy.time <= seen[copy.stream];
  });
  auto outdated = [&](const Access& one) {  // whoever is ordered behind this one is ordered behind those too
    return one.stream == current && (writes || !one.writes) && now.range.holds(one.range);
  };
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(), outdated), accesses.end());
  accesses.push_back(now);
}

// ---------------------------------------------------------------------------------- memory

// What a copy was to read of this range is kept for it. What it was to write there is nobody's.
void keep_for_copies(const Range& freed) {
  std::vector<Copy> before, left;
  for (auto& copy : card().under_way) before.push_back(std::move(copy));
  for (auto& copy : before) {
    if (copy.written.meets(freed)) continue;
    left.push_back(copy);
    if (!copy.read.meets(freed)) continue;
    left.back().from = copy.from.clone();
    left.back().read = {};
  }
  card().under_way.assign(std::make_move_iterator(left.begin()), std::make_move_iterator(left.end()));
}

void find_users(const Block& block) {
  Clock seen = card().clocks[block.stream];
  join(seen, card().clocks[HOST]);
  for (auto& access : block.accesses)
    if (access.stream != block.stream && !block.recorded.count(access.stream) && seen[access.stream] < access.time)
      report("freed while " + access.what + " on stream " + std::to_string(access.stream) +
             " may still run: record_stream is missing");
}

void free_block(void* address) {
  Lock hold(card().lock);
  auto found = card().blocks.find((char*)address);
  if (found == card().blocks.end()) return;
  auto& block = found->second;
  auto range = block.range(found->first);
  if (block.on_card) find_users(block);
  keep_for_copies(range);
  if (block.on_card)
    card().held -= block.taken();
  else
    card().unused.insert(card().pinned.extract(block.pinned()));
  memset(address, 255, block.size);  // NaN in every floating dtype
  card().blocks.erase(found);
  free(address);
}

void note_peak() {
  card().peak = card().held;
  if (!card().explains) return;
  card().at_peak.clear();
  for (auto& [_, block] : card().blocks)
    if (block.on_card) card().at_peak.push_back(block.taken());
}

void pin(size_t size) {
  auto kept = card().unused.extract(size);
  kept ? card().pinned.insert(std::move(kept)) : card().pinned.insert(size);
}

void* new_block(size_t size, bool on_card) {
  Lock hold(card().lock);
  void* address = nullptr;
  size_t taken = std::max<size_t>(size, 512);
  TORCH_CHECK(posix_memalign(&address, 512, taken) == 0);
  memset(address, 255, taken);
  auto& block = card().blocks[(char*)address] = {size, on_card, current, {}, {}};
  if (on_card && (card().held += block.taken()) > card().peak) note_peak();
  if (!on_card) pin(block.pinned());
  return address;
}

void use_on(const void* address, int stream) {
  Lock hold(card().lock);
  auto found = block_of(address);
  if (found != card().blocks.end()) found->second.recorded.insert(stream);
}

struct CardMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* address = new_block(size, true);
    return {address, address, &free_block, Device(kCUDA, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t count) const override { memcpy(to, from, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const DataPtr& data, c10::Stream on) override { use_on(data.get(), on.id()); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = card().held;
    stats.allocated_bytes[0].peak = stats.reserved_bytes[0].peak = card().peak;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { card().peak = card().held; }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override { return {MEMORY - card().held, MEMORY}; }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* address = new_block(size, false);
    return {address, address, &free_block, Device(kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t count) const override { memcpy(to, from, count); }
};
CardMemory on_card;
PinnedMemory pinned;

// ---------------------------------------------------------------------------------- what torch asks a device

struct CardGenerator final : c10::GeneratorImpl {
  Generator own = at::detail::createCPUGenerator();
  CardGenerator() : c10::GeneratorImpl(Device(kCUDA, 0), DispatchKeySet(DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { own.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return own.current_seed(); }
  uint64_t seed() override { return own.seed(); }
  void set_state(const c10::TensorImpl& state) override { own.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return own.unsafeGetGeneratorImpl()->get_state(); }
  CardGenerator* clone_impl() const override {
    auto* made = new CardGenerator;
    made->own = own.clone();
    return made;
  }
};

Generator& default_generator() {
  static Generator one = make_generator<CardGenerator>();
  return one;
}

Generator own_of(const Generator& generator) {
  return static_cast<CardGenerator*>(generator.unsafeGetGeneratorImpl())->own;
}

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<CardGenerator>(); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* address) const override {
    Lock hold(card().lock);
    auto found = block_of(address);
    return found != card().blocks.end() && !found->second.on_card;
  }
};

int64_t new_stream() { return 1 + card().streams++ % (HOST - 1); }  // a pool, as torch has one

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device) const override { return {kCUDA, 0}; }
  Device getDevice() const override { return {kCUDA, 0}; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  static c10::Stream stream(int number) { return c10::Stream(c10::Stream::UNSAFE, {kCUDA, 0}, number); }
  c10::Stream getStream(Device) const override { return stream(current); }
  c10::Stream getDefaultStream(Device) const override { return stream(0); }
  c10::Stream exchangeStream(c10::Stream to) const override { return stream(std::exchange(current, (int)to.id())); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getNewStream(Device, int) const override { return stream(new_stream()); }
  c10::Stream getStreamFromGlobalPool(Device, bool) const override { return stream(new_stream()); }
  void record(void** event, const c10::Stream& on, DeviceIndex, c10::EventFlag) const override {
    Lock hold(card().lock);
    if (!*event) *event = new Moment;
    auto& clock = card().clocks[on.id()];
    join(clock, card().clocks[HOST]);
    *(Moment*)*event = {clock, std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& on) const override {
    Lock hold(card().lock);
    if (card().planted == (on.id() ? "other streams do not wait" : "the default stream does not wait")) return;
    if (event) join(card().clocks[on.id()], ((Moment*)event)->clock);
  }
  void synchronizeEvent(void* event) const override {  // it knows what it waits for, and until when: not counted
    Lock hold(card().lock);
    if (event && card().planted != "the host does not wait") host_waits(((Moment*)event)->clock, "");
  }
  void synchronizeStream(const c10::Stream& on) const override {
    Lock hold(card().lock);
    host_waits(card().clocks[on.id()], "stream.synchronize");
  }
  void synchronizeDevice(DeviceIndex) const override {
    Lock hold(card().lock);
    Clock all{};
    for (auto& clock : card().clocks) join(all, clock);
    host_waits(all, "");
  }
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(((Moment*)to)->at - ((Moment*)from)->at).count();
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete (Moment*)event; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    use_on(data.get(), on.id());
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---------------------------------------------------------------------------------- operations of their own

Tensor tensor_over(const Storage& storage, const Tensor& like, DispatchKey key) {
  auto made = at::detail::make_tensor<TensorImpl>(Storage(storage), DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

Storage host_view(const Storage& storage) {  // the same bytes, as the CPU sees them
  DataPtr data(storage.unsafeGetStorageImpl()->mutable_data(), kCPU);
  return {Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(kCPU), true};
}

Tensor host_view(const Tensor& tensor) { return tensor_over(host_view(tensor.storage()), tensor, DispatchKey::CPU); }

using Bool = std::optional<bool>;
Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device>, Bool,
             std::optional<MemoryFormat> format) {
  return at::detail::empty_generic(size, &on_card, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device>, Bool) {
  auto keys = DispatchKeySet(DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &on_card, keys, dtype_or_default(dtype));
}

// Whether a copy between host and card leaves the host free: its bytes lie in pinned memory, and are moved as they are.
bool runs_alone(const Tensor& to, const Tensor& from, const Tensor& on_host) {
  return at::detail::getCUDAHooks().isPinnedPtr(on_host.const_data_ptr()) && to.is_non_overlapping_and_dense() &&
         to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() && to.strides() == from.strides();
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  Lock hold(card().lock);
  c10::impl::ExcludeDispatchKeyGuard plain(c10::autograd_dispatch_keyset);
  if (self.numel() == 0) return self;
  auto time = launch();
  bool to_card = self.is_cuda(), crosses = to_card != source.is_cuda();
  Tensor to = to_card ? host_view(self) : self, from = source.is_cuda() ? host_view(source) : source;
  if (source.is_cuda()) touch(source, false, "copy", time);
  if (to_card) touch(self, true, "copy", time);
  if (crosses && non_blocking && runs_alone(to, from, to_card ? from : to)) {
    auto written = range_of(to);
    memset(written.begin, 255, written.end - written.begin);  // NaN until it has arrived
    auto& clock = card().clocks[current];
    card().under_way.push_back({to.detach(), from.detach(), written, range_of(from), current, time, clock});
    return self;
  }
  if (crosses && !(non_blocking && to_card))
    host_waits(card().clocks[current], to_card ? "copy to the card" : "copy to the host");
  to.copy_(from);
  return self;
}

Scalar item(const Tensor& self) {
  Lock hold(card().lock);
  touch(self, false, "item", launch());
  host_waits(card().clocks[current], "item");
  return host_view(self).item();
}

void record_stream(Tensor& self, c10::Stream stream) { use_on(self.storage().data(), stream.id()); }

// ---------------------------------------------------------------------------------- all other operations

// The host needs the result's size, or an answer, before it can go on.
const std::set<std::string> WAITING = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2",           "aten::unique_dim",
    "aten::equal",   "aten::bincount",      "aten::repeat_interleave", "aten::_linalg_check_errors",
};
const std::set<std::string> INDEXING = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};
const std::set<std::string> TWO_DEVICES = {"aten::_foreach_copy_", "aten::set_"};  // that may have tensors of both

// One call of an operation: its tensors become the CPU's views of the same bytes, and its results the card's.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op(op), stack(stack), schema(op.schema()), name(schema.name()) {
    for (auto& result : schema.returns()) is_view |= result.alias_info() && !result.alias_info()->isWrite();
  }

  void run() {
    give_arguments();
    refuse_two_devices();
    time = is_view ? 0 : launch();
    if (!is_view)
      for (auto& use : uses) touch(use.tensor, use.writes, name, time);
    if (waits()) host_waits(card().clocks[current], name);
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
    for (auto& [_, pair] : given) take_back_size(*pair.first.unsafeGetTensorImpl(), pair.second);
    take_results();
  }

 private:
  struct Use {
    Tensor tensor;
    bool writes;
  };
  const c10::OperatorHandle& op;
  torch::jit::Stack* stack;
  const c10::FunctionSchema& schema;
  std::string name;
  bool is_view = false, has_card = false, has_host = false, makes_card = false, host_generator = false;
  uint64_t time = 0;
  std::vector<Use> uses;
  std::unordered_map<c10::StorageImpl*, Storage> views, owners;      // the card's storage -> the CPU's, and back
  std::unordered_map<TensorImpl*, std::pair<Tensor, Tensor>> given;  // the CPU's tensor -> itself and the card's

  // Replace each tensor in a value, alone or in a list.
  template <class Change>
  static void each_tensor(IValue& value, Change change) {
    if (value.isTensor()) {
      value = change(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> made;
      for (const Tensor& tensor : value.toTensorVector()) made.push_back(change(tensor));
      value = c10::List<Tensor>(made);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (const auto& tensor : value.toOptionalTensorVector())
        made.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
      value = made;
    }
  }

  void give_arguments() {
    size_t count = schema.arguments().size(), first = stack->size() - count;
    for (size_t i = 0; i < count; i++) {
      IValue& value = (*stack)[first + i];
      auto& argument = schema.arguments()[i];
      bool writes = argument.alias_info() && argument.alias_info()->isWrite();
      each_tensor(value, [&](const Tensor& tensor) { return on_host(tensor, writes); });
      if (value.isDevice()) {
        makes_card |= value.toDevice().is_cuda();
        value = Device(kCPU);
      } else if (value.isGenerator()) {
        auto generator = value.toGenerator();
        host_generator |= !generator.device().is_cuda();
        if (generator.device().is_cuda()) value = own_of(generator);
      } else if (value.isNone() && argument.name() == "generator") {
        value = own_of(default_generator());
      }
    }
  }

  Tensor on_host(const Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      has_host |= tensor.dim() > 0 || name == "aten::cat";  // a single number of the host goes with the launch
      return tensor;
    }
    has_card = true;
    uses.push_back({tensor, writes});
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    if (!views.count(storage)) {
      views[storage] = host_view(tensor.storage());
      owners[views[storage].unsafeGetStorageImpl()] = tensor.storage();
    }
    Tensor made = tensor_over(views[storage], tensor, DispatchKey::CPU);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    given[made.unsafeGetTensorImpl()] = {made, tensor};
    return made;
  }

  void refuse_two_devices() {
    bool may = INDEXING.count(name) || TWO_DEVICES.count(name);
    if (has_card && has_host && !may) {
      auto error = "tensors on cuda:0 and on the cpu in one call of " + name + "." + schema.overload_name();
      report(error);
      TORCH_CHECK(false, "simcuda: ", error);
    }
    bool card = has_card || makes_card;
    TORCH_CHECK(!(host_generator && card), "Expected a 'cuda' device type for generator but found 'cpu': ", name);
  }

  bool waits() const {
    auto mask = [](const Use& use) { return use.tensor.scalar_type() == kBool && !use.writes; };
    bool by_mask = INDEXING.count(name) && !uses.empty() && std::any_of(uses.begin() + 1, uses.end(), mask);
    return WAITING.count(name) || by_mask;
  }

  // An out= tensor may have got another size, and with it other memory.
  static void take_back_size(const TensorImpl& made, const Tensor& tensor) {
    auto& storage = tensor.storage();
    if (made.sizes() == tensor.sizes() && made.storage().data() == storage.data()) return;
    size_t size = made.storage().nbytes();
    if (size > storage.nbytes()) {
      auto data = on_card.allocate(size);
      memcpy(data.get(), made.storage().data(), size);
      storage.set_data_ptr(std::move(data));
      storage.set_nbytes(size);
    }
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
  }

  void take_results() {
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
      each_tensor((*stack)[i], [&](const Tensor& tensor) { return to_card(tensor); });
  }

  Tensor to_card(const Tensor& result) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    auto known = given.find(result.unsafeGetTensorImpl());
    if (known != given.end()) return known->second.second;
    auto owner = owners.find(result.storage().unsafeGetStorageImpl());
    if (owner != owners.end()) return tensor_over(owner->second, result, DispatchKey::CUDA);
    if (!has_card && !makes_card) return result;
    size_t size = result.storage().nbytes();
    auto data = on_card.allocate(size);
    if (size) memcpy(data.get(), result.storage().data(), size);
    Storage storage(Storage::use_byte_size_t(), size, std::move(data), &on_card, true);
    Tensor made = tensor_over(storage, result, DispatchKey::CUDA);
    touch(made, true, name, time);
    return made;
  }
};

void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Lock hold(card().lock);
  Call(op, stack).run();
}

// As a card has it, attention that keeps no matrix of tokens by tokens: the CPU's own, where that can do it.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout,
                 bool causal, std::optional<double> scale, bool grouped) {
  bool plain = q.dim() == 4 && q.size(-1) == v.size(-1) && dropout == 0 && !grouped;
  if (!plain || (mask && mask->requires_grad()))
    return at::native::scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale, grouped);
  auto added = mask;
  if (mask && mask->scalar_type() == kBool)
    added = at::zeros_like(*mask, q.options()).masked_fill_(mask->logical_not(), -INFINITY);
  return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, added, scale));
}

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", attention); }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
  m.impl("scaled_dot_product_attention", attention);
  for (auto name : {"convolution", "convolution_backward", "silu_backward"})  // torch's own choose by the device
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

// Several processes: collectives are gloo's, on the card's bytes, which lie in the host's memory.
TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (auto name : {"allreduce_", "broadcast_", "allgather_", "_allgather_base_", "_reduce_scatter_base_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

// ---------------------------------------------------------------------------------- for card.py

void enable() {
  c10::SetAllocator(kCUDA, &on_card, 1);
  auto* hooks = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  // torch has made its own, which say that there is no card; they have no members, so ours can take their place
  if (!hooks->hasCUDA()) *(void**)hooks = *(void**)new Hooks;
}

int64_t pinned_bytes() {
  size_t sum = 0;
  for (auto* pieces : {&card().pinned, &card().unused})
    for (size_t size : *pieces) sum += size;
  return sum;
}

int64_t peak(bool forget) {
  auto found = card().peak;
  if (forget) card().peak = card().held;
  return found;
}

void resize(int64_t storage, int64_t size) {  // a storage by its address
  Lock hold(card().lock);
  auto* impl = (c10::StorageImpl*)storage;
  auto data = size ? on_card.allocate(size) : DataPtr(nullptr, Device(kCUDA, 0));
  if (auto kept = std::min<size_t>(size, impl->nbytes())) memcpy(data.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(size);
}

TORCH_LIBRARY(simcuda, m) {
  m.def("resize(int storage, int size) -> ()", &resize);
  m.def("enable() -> ()", &enable);
  m.def("generator() -> Generator?", [] { return std::optional<Generator>(default_generator()); });
  m.def("plant(str fault) -> ()", [](std::string fault) { card().planted = fault; });
  m.def("may_wait(bool yes) -> ()", [](bool yes) { card().may_wait = yes; });
  m.def("errors() -> str[]", [] { return std::exchange(card().errors, {}); });
  m.def("waits() -> str[]", [] { return std::exchange(card().waits, {}); });
  m.def("held() -> int", [] { return (int64_t)card().held; });
  m.def("peak(bool forget) -> int", &peak);
  m.def("pinned() -> int", &pinned_bytes);
  m.def("empty_host_cache() -> ()", [] { card().unused.clear(); });
  m.def("explain_peak(bool yes) -> ()", [](bool yes) { card().explains = yes; });
  m.def("at_peak() -> int[]", [] { return card().at_peak; });
}
}  // namespace
