// What the dispatch key CUDA lacks in a CPU-only build of PyTorch: memory, a device, random numbers and kernels.
//
// Everything above the kernels is PyTorch's: composite operators, autograd and its thread for the device, autocast, the
// device checks of TensorIterator, `.numpy()`, serialisation. Below them one boxed fallback computes every operator on
// the host, on tensors that share the memory of its arguments. See __init__.py for what this shows and what it cannot.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/NativeFunctions.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <numeric>
#include <unordered_set>

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using OptionalTensor = std::optional<Tensor>;

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;
const Device HOST(c10::DeviceType::CPU);
const c10::DispatchKeySet CUDA_KEYS(c10::DispatchKey::CUDA), HOST_KEYS(c10::DispatchKey::CPU);

// ---- events ---------------------------------------------------------------------------------------------------------

PyObject* listener = nullptr;  // a Python function of (kind, operator)
std::atomic<bool> listening{false};

void tell(const char* kind, const std::string& op) {
  if (!listening) return;
  pybind11::gil_scoped_acquire gil;
  PyObject* result = PyObject_CallFunction(listener, "ss", kind, op.c_str());
  if (result == nullptr) throw pybind11::error_already_set();
  Py_DECREF(result);
}

// ---- memory ---------------------------------------------------------------------------------------------------------

DeviceIndex devices = 1;
thread_local DeviceIndex current = 0;

std::mutex memory_lock;
int64_t allocated = 0, peak = 0;
std::unordered_set<const void*> pinned;

void count_bytes(int64_t bytes) {
  std::lock_guard<std::mutex> lock(memory_lock);
  peak = std::max(peak, allocated += bytes);
}

struct Block {  // of the pretended device: its own bytes, or those of a result that was computed on the host
  void* bytes;
  size_t size;
  c10::Storage result;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  count_bytes(-static_cast<int64_t>(block->size));
  c10::free_cpu(block->bytes);
  delete block;
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* bytes = c10::alloc_cpu(size);  // null if there are none
    if (size) memset(bytes, 0xff, size);  // NaN in every floating-point format, -1 in integers
    count_bytes(static_cast<int64_t>(size));
    return {bytes, new Block{bytes, size, {}}, &free_block, Device(CUDA, current)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
} device_memory;

void free_pinned(void* bytes) {
  std::lock_guard<std::mutex> lock(memory_lock);
  pinned.erase(bytes);
  c10::free_cpu(bytes);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* bytes = c10::alloc_cpu(size);
    std::lock_guard<std::mutex> lock(memory_lock);
    pinned.insert(bytes);
    return {bytes, bytes, &free_pinned, HOST};
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
} pinned_memory;

bool in_pinned_memory(const void* bytes) {
  std::lock_guard<std::mutex> lock(memory_lock);
  return bytes != nullptr && pinned.count(bytes) > 0;
}

// ---- copies that the host has not waited for ------------------------------------------------------------------------
// The device's work is done at once here, so a host that reads a result too early would read the right one. Copies from
// and to pinned memory therefore show their order: the bytes of a copy to the host arrive when the host waits (until
// then its destination is 0xff), and a source on the host must not have changed by then.

struct Copy {
  int64_t number;
  bool to_host;
  Tensor host;   // keeps the memory alive, as CUDA's allocator of pinned memory does
  Tensor bytes;  // the values on the device when the copy was asked for; of a source, the values then
};
std::mutex copies_lock;
std::vector<Copy> copies;
int64_t copies_asked = 0;

void settle(int64_t until) {  // the host has waited for the copies up to this number
  std::vector<Copy> done;
  {
    std::lock_guard<std::mutex> lock(copies_lock);
    auto open = std::stable_partition(copies.begin(), copies.end(), [&](const Copy& c) { return c.number <= until; });
    done.assign(copies.begin(), open);
    copies.erase(copies.begin(), open);
  }
  for (Copy& copy : done) {
    if (copy.to_host) copy.host.copy_(copy.bytes);
    else
      TORCH_CHECK(memcmp(copy.host.const_data_ptr(), copy.bytes.const_data_ptr(), copy.host.nbytes()) == 0,
                  "pretended CUDA: pinned memory was changed before its copy to the device had ended; wait for an "
                  "event after the copy, or take another buffer");
  }
}

void wait(const std::string& op, const char* kind = "sync") {  // for all that the device was asked to do
  settle(INT64_MAX);
  tell(kind, op);
}

// ---- devices, streams and random numbers ----------------------------------------------------------------------------

DeviceIndex or_current(DeviceIndex index) { return index < 0 ? current : index; }

struct Guard final : c10::impl::DeviceGuardImplInterface {  // one stream, the default one, on every device
  c10::DeviceType type() const override { return CUDA; }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  Device getDevice() const override { return {CUDA, current}; }
  void setDevice(Device device) const override { current = or_current(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current = or_current(device.index()); }
  Device exchangeDevice(Device device) const override {
    return {CUDA, std::exchange(current, or_current(device.index()))};
  }
  c10::Stream getStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, Device(CUDA, or_current(device.index())));
  }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  void record(void**, const c10::Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  void synchronizeStream(const c10::Stream&) const override { wait("synchronizeStream"); }
  void synchronizeDevice(DeviceIndex) const override { wait("synchronizeDevice"); }
};

struct Generator final : c10::GeneratorImpl {  // draws with a generator of the host
  at::Generator host;
  explicit Generator(DeviceIndex index, at::Generator host_ = at::detail::createCPUGenerator())
      : GeneratorImpl(Device(CUDA, index), CUDA_KEYS), host(std::move(host_)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new Generator(device().index(), host.clone()); }
};

const at::Generator& default_generator(DeviceIndex index) {
  static const std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex device = 0; device < devices; ++device) made.push_back(at::make_generator<Generator>(device));
    return made;
  }();
  return generators.at(or_current(index));
}

struct Hooks final : at::CUDAHooksInterface {  // what ATen asks of CUDA's library
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return devices; }
  DeviceIndex deviceCount() const override { return devices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return std::exchange(current, or_current(index)); }
  Device getDeviceFromPtr(void*) const override { return {CUDA, current}; }
  void deviceSynchronize(DeviceIndex) const override { wait("deviceSynchronize"); }
  bool isPinnedPtr(const void* bytes) const override { return in_pinned_memory(bytes); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(or_current(index));
  }
};

// ---- tensors of the device and of the host over the same memory -----------------------------------------------------

Tensor tensor_over(c10::Storage storage, c10::DispatchKeySet keys, const Tensor& shape) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, shape.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(), shape.storage_offset());
  return made;
}

Tensor on_host(const Tensor& tensor) {  // a view of the device's tensor, which must outlive it
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const c10::Storage& storage = tensor.storage();
  c10::DataPtr bytes(const_cast<void*>(storage.data()), HOST);
  return tensor_over({c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes)}, HOST_KEYS, tensor);
}

Tensor on_device(const Tensor& result, Device device) {  // takes over a new tensor of the host
  const c10::Storage& storage = result.storage();
  count_bytes(static_cast<int64_t>(storage.nbytes()));
  auto* block = new Block{nullptr, storage.nbytes(), storage};
  c10::DataPtr bytes(const_cast<void*>(storage.data()), block, &free_block, device);
  c10::Storage taken(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes), &device_memory, true);
  return tensor_over(std::move(taken), CUDA_KEYS, result);
}

// ---- the kernel of every operator that has no other one below -------------------------------------------------------

using Names = std::unordered_set<std::string>;
Names number_takers;  // take numbers of the host beside tensors: `device_check: NoCheck` of native_functions.yaml
const Names WAITING{"nonzero", "nonzero.out", "masked_select", "masked_select.out", "_unique", "_unique2", "unique_dim",
                    "unique_consecutive", "unique_dim_consecutive", "bincount", "equal", "_local_scalar_dense"};
const Names PRODUCTS{"mm", "mv", "dot", "bmm", "addmm", "addmm_", "addmv", "addmv_", "addbmm", "baddbmm", "baddbmm_"};
const Names SILENT{"_local_scalar_dense", "_fused_sdp_choice", "record_stream", "is_set_to"};

template <class Function>
IValue map_tensors(const IValue& value, Function function) {  // a tensor, or each one of a list
  auto defined = [&](const Tensor& t) { return t.defined() ? function(t) : t; };
  if (value.isTensor()) return defined(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(defined(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<OptionalTensor> list;
    for (const OptionalTensor& t : value.toOptionalTensorVector())
      list.push_back(t ? OptionalTensor(defined(*t)) : t);
    return list;
  }
  return value;
}

class Call {  // of an operator, whose arguments lie on the stack
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), arguments_(op.schema().arguments()), stack_(stack),
        values_(stack.end() - static_cast<int64_t>(arguments_.size()), stack.end()), device_(CUDA, current) {
    full_ = c10::toString(op.operator_name());
    name_ = full_.substr(full_.rfind("::") + 2);
    base_ = name_.substr(0, name_.find('.'));
    puts_ = base_.find("index_put") != std::string::npos;
  }

  void run() {
    find_device();
    for (size_t i = 0; i < values_.size(); ++i)
      map_tensors(values_[i], [&](const Tensor& t) { return check(t, i), t; });
    const size_t first = stack_.size() - values_.size();
    for (size_t i = 0; i < values_.size(); ++i) stack_[first + i] = lower(values_[i], arguments_[i]);
    if (!SILENT.count(name_)) tell("launch", full_);
    if (waits()) wait(full_);
    op_.redispatchBoxed(HOST_KEYS, &stack_);
    for (auto& [device, host] : lowered_) resize_like(device, host);
    const auto& returns = op_.schema().returns();
    for (size_t r = 0; r < returns.size(); ++r) {
      IValue& value = stack_[stack_.size() - returns.size() + r];
      const auto* alias = returns[r].alias_info();
      if (alias && alias->isWrite()) value = written_argument(*alias);
      else value = map_tensors(value, [&](const Tensor& t) { return raise(t); });
    }
  }

 private:
  void find_device() {  // of the first tensor that lies on one, else the one that is asked for
    for (const IValue& value : values_) map_tensors(value, [&](const Tensor& t) {
      if (t.is_cuda() && !tensors_) tensors_ = true, device_ = t.device();
      return t;
    });
    for (const IValue& value : values_)
      if (!tensors_ && value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index())
        device_ = value.toDevice();
  }

  bool is_written(size_t i) const { return arguments_[i].alias_info() && arguments_[i].alias_info()->isWrite(); }

  void check(const Tensor& tensor, size_t i) const {  // as the wrappers that torchgen writes for CUDA
    if (arguments_[i].name() == "indices" && (puts_ || base_ == "index" || base_ == "_unsafe_index")) {
      if (!tensor.is_cuda()) wait(full_ + " with indices of the host", "h2d");
      return;
    }
    TORCH_CHECK(!PRODUCTS.count(base_) || !c10::isIntegralType(tensor.scalar_type(), true), "\"addmm_cuda\" not implemented for '",
                tensor.scalar_type(), "'");
    const bool number = tensor.is_cpu() && tensor.dim() == 0 && !is_written(i) && number_takers.count(full_);
    TORCH_CHECK(!tensors_ || number || tensor.device() == device_, "Expected all tensors to be on the same device, ",
                "but got ", arguments_[i].name(), " is on ", tensor.device(), ", different from other tensors on ",
                device_, " (when checking argument in method wrapper_CUDA_", name_, ")");
  }

  bool waits() const {
    if (name_ == "repeat_interleave.Tensor") return values_.back().isNone();  // the length of the result is not given
    if (!puts_) return WAITING.count(name_);
    // `index` has turned masks into places by `nonzero` before this; here a mask takes a single number without that
    bool mask = false;
    map_tensors(values_[1], [&](const Tensor& t) { return mask |= t.is_cuda() && t.scalar_type() == at::kBool, t; });
    const Tensor& number = values_[2].toTensor();
    return mask && (values_[3].toBool() || number.numel() != 1 || number.is_cuda());
  }

  IValue lower(const IValue& value, const c10::Argument& argument) {
    if (value.isDevice() && value.toDevice().is_cuda()) return HOST;
    if (value.isGenerator() || (value.isNone() && argument.name() == "generator")) {
      const at::Generator& random = value.isNone() ? default_generator(device_.index()) : value.toGenerator();
      TORCH_CHECK(random.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
                  random.device(), "'");
      return static_cast<Generator*>(random.unsafeGetGeneratorImpl())->host;
    }
    return map_tensors(value, [&](const Tensor& tensor) {
      if (!tensor.is_cuda()) return tensor;
      // an empty output will be resized, which memory of another one does not allow
      const bool resized = argument.is_out() && !tensor.numel();
      lowered_.emplace_back(tensor, resized ? at::empty({0}, tensor.options().device(HOST)) : on_host(tensor));
      return lowered_.back().second;
    });
  }

  static void resize_like(const Tensor& device, const Tensor& host) {
    if (device.sizes() == host.sizes()) return;
    if (device.storage().data() == host.storage().data()) {
      device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    } else {
      device.resize_(host.sizes());
      on_host(device).copy_(host);
    }
  }

  const IValue& written_argument(const c10::AliasInfo& alias) const {
    for (size_t i = 0; i < values_.size(); ++i)
      if (is_written(i) && arguments_[i].alias_info()->beforeSets() == alias.beforeSets()) return values_[i];
    TORCH_INTERNAL_ASSERT(false, full_, " returns an argument that it does not have");
  }

  Tensor raise(const Tensor& result) const {
    if (!result.is_cpu()) return result;
    for (const auto& [device, host] : lowered_)  // a view
      if (result.storage().nbytes() && result.storage().data() == host.storage().data())
        return tensor_over(device.storage(), CUDA_KEYS, result);
    return on_device(result, device_);
  }

  const c10::OperatorHandle& op_;
  const std::vector<c10::Argument>& arguments_;
  torch::jit::Stack& stack_;
  const std::vector<IValue> values_;
  std::string full_, name_, base_;  // with the namespace, without it, and without the overload
  bool puts_, tensors_ = false;  // whether it assigns by indices; whether an argument lies on the device
  Device device_;
  std::vector<std::pair<Tensor, Tensor>> lowered_;  // arguments on the device and on the host
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  Call(op, *stack).run();
}

// ---- operators that make, view and copy tensors ---------------------------------------------------------------------

c10::DeviceGuard guard_of(std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const Device chosen = device && device->has_index() ? *device : Device(CUDA, current);
  TORCH_CHECK(chosen.index() < devices, "CUDA error: invalid device ordinal");
  return c10::DeviceGuard(chosen);
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  const auto guard = guard_of(device, pin);
  return at::detail::empty_generic(size, &device_memory, CUDA_KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  const auto guard = guard_of(device, pin);
  return at::detail::empty_strided_generic(size, stride, &device_memory, CUDA_KEYS, c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source) || !self.numel()) return self;
  at::AutoDispatchBelowADInplaceOrView below;
  const Tensor& host = self.is_cuda() ? source : self;
  // CUDA copies to pageable memory, and between formats, before it returns; from it without waiting for earlier work
  const bool plain = host.is_cpu() && in_pinned_memory(host.storage().data()) && host.is_contiguous() &&
                     self.scalar_type() == source.scalar_type();
  if (!host.is_cpu()) {
    tell("launch", "aten::copy_");
  } else if (self.is_cuda()) {
    if (non_blocking) tell("h2d_async", "aten::copy_");
    else wait("aten::copy_", "h2d");
  } else if (!non_blocking || !plain) {
    wait("aten::copy_ to the host");
  } else {
    tell("d2h_async", "aten::copy_");
  }
  if (non_blocking && plain) {
    const bool to_host = !self.is_cuda();
    std::lock_guard<std::mutex> lock(copies_lock);
    copies.push_back({++copies_asked, to_host, host, on_host(source).clone(at::MemoryFormat::Contiguous)});
    if (to_host) {
      memset(self.data_ptr(), 0xff, self.nbytes());
      return self;
    }
  }
  Tensor to = on_host(self);
  to.copy_(on_host(source));
  return self;
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const c10::DeviceGuard guard(self.device());
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, std::nullopt);  // by the storage's own allocator
  return self;
}

Tensor& set_empty(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_memory.allocate(0), &device_memory, true);
  return self.set_(std::move(storage), 0, {0}, {1});
}

// ---- attention in one launch, as CUDA's memory-efficient kernel -----------------------------------------------------

bool is_aligned(const Tensor& tensor) { return tensor.size(-1) % (tensor.element_size() == 2 ? 8 : 4) == 0; }

int64_t choose_attention(const Tensor& query, const Tensor&, const Tensor& value, const OptionalTensor&, double, bool,
                         std::optional<double>, bool) {
  const bool fits = query.scalar_type() != at::kDouble && query.dim() == 4 && is_aligned(query) && is_aligned(value);
  return static_cast<int64_t>(fits ? at::SDPBackend::efficient_attention : at::SDPBackend::math);
}

struct Scores {  // all in float32 on the host; every query head has a key head
  Tensor query, key, value, scores;  // scores: [batch, heads, queries, keys]
  double scale;

  Scores(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, bool causal, std::optional<double> s)
      : query(on_host(q).to(at::kFloat)), key(on_host(k).to(at::kFloat)), value(on_host(v).to(at::kFloat)),
        scale(s.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))))) {
    for (const Tensor& tensor : {q, k, v}) {
      TORCH_CHECK(tensor.scalar_type() == q.scalar_type(), "Expected query, key, and value to have the same dtype");
      TORCH_CHECK(is_aligned(tensor) && tensor.stride(-1) == 1, "query, key or value is not correctly aligned");
    }
    for (const Tensor& tensor : {k, v, bias})
      TORCH_CHECK(!tensor.defined() || tensor.device() == q.device(), "Expected all tensors to be on the same device, "
                  "but found at least two devices, ", q.device(), " and ", tensor.device(), "!");
    if (const int64_t groups = query.size(1) / key.size(1); groups > 1) {
      key = key.repeat_interleave(groups, 1);
      value = value.repeat_interleave(groups, 1);
    }
    scores = at::matmul(query, key.mT()) * scale;
    if (bias.defined()) scores = scores + on_host(bias).to(at::kFloat);
    if (causal) scores.masked_fill_(at::ones({q.size(2), k.size(2)}, at::kBool).tril().logical_not(), -INFINITY);
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias, bool with_sums, double,
    bool causal, std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below;
  tell("launch", "aten::_scaled_dot_product_efficient_attention");
  const Scores s(query, key, value, bias.value_or(Tensor()), causal, scale);
  const int64_t queries = query.size(2), padded = with_sums ? (queries + 31) / 32 * 32 : 0;
  Tensor sums = at::full({query.size(0), query.size(1), padded}, INFINITY, at::kFloat);
  if (with_sums) sums.slice(2, 0, queries).copy_(s.scores.logsumexp(-1));
  // queries that see no key give 0; in memory the result is [batch, queries, heads, width]
  const Tensor mixed = at::matmul(s.scores.softmax(-1).nan_to_num_(0.0), s.value).to(query.scalar_type());
  const Tensor out = mixed.transpose(1, 2).contiguous().transpose(1, 2);
  return {on_device(out, query.device()), on_device(sums, query.device()), at::zeros({}, at::kLong),
          at::zeros({}, at::kLong)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
    const Tensor& out, const Tensor& sums, const Tensor&, const Tensor&, double, std::array<bool, 4> wanted,
    bool causal, std::optional<double> scale) {
  if (!gradient.defined()) return {};
  at::AutoDispatchBelowADInplaceOrView below;
  tell("launch", "aten::_scaled_dot_product_efficient_attention_backward");
  const Scores s(query, key, value, bias, causal, scale);
  const Tensor by_out = on_host(gradient).to(at::kFloat), sum = on_host(sums).slice(2, 0, query.size(2)).unsqueeze(-1);
  const Tensor weights = (s.scores - sum).exp().nan_to_num_(0.0);
  const Tensor mean = (by_out * on_host(out).to(at::kFloat)).sum(-1, true);
  const Tensor by_scores = weights * (at::matmul(by_out, s.value.mT()) - mean);
  auto back = [&](Tensor made, const Tensor& like) {
    if (made.size(1) != like.size(1)) made = made.unflatten(1, {like.size(1), -1}).sum(2);
    return on_device(made.to(like.scalar_type()).contiguous(), query.device());
  };
  Tensor by_bias;
  if (wanted[3] && bias.defined())
    by_bias = on_device(at::sum_to(by_scores, bias.sizes()).to(bias.scalar_type()).contiguous(), query.device());
  return {back(at::matmul(by_scores, s.key) * s.scale, query), back(at::matmul(by_scores.mT(), s.query) * s.scale, key),
          back(at::matmul(weights.mT(), by_out), value), by_bias};
}

// ---- RMS norms in one launch ----------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> rms_norm(const Tensor& self, at::IntArrayRef shape, const OptionalTensor& weight,
                                    std::optional<double> eps) {
  at::AutoDispatchBelowADInplaceOrView below;
  tell("launch", "aten::_fused_rms_norm");
  const Tensor x = on_host(self).to(at::kFloat);
  std::vector<int64_t> axes(shape.size());
  std::iota(axes.begin(), axes.end(), -static_cast<int64_t>(shape.size()));
  const Tensor scale = (x.square().mean(axes, true) + eps.value_or(1.1920929e-07)).rsqrt();
  Tensor out = x * scale;
  if (weight) out = out * on_host(*weight).to(at::kFloat);
  return {on_device(out.to(self.scalar_type()), self.device()), on_device(scale, self.device())};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& gradient, const Tensor& self, at::IntArrayRef shape,
                                             const Tensor& scale, const OptionalTensor& weight, std::array<bool, 2>) {
  at::AutoDispatchBelowADInplaceOrView below;
  tell("launch", "aten::_fused_rms_norm_backward");
  const Tensor x = on_host(self).to(at::kFloat), r = on_host(scale), g = on_host(gradient).to(at::kFloat);
  const Tensor scaled = weight ? g * on_host(*weight).to(at::kFloat) : g;
  std::vector<int64_t> axes(shape.size());
  std::iota(axes.begin(), axes.end(), -static_cast<int64_t>(shape.size()));
  const Tensor by_x = r * (scaled - x * r.square() * (scaled * x).mean(axes, true));
  Tensor by_weight;
  if (weight) by_weight = on_device(at::sum_to(g * x * r, shape).to(weight->scalar_type()), self.device());
  return {on_device(by_x.to(self.scalar_type()), self.device()), by_weight};
}

// ---- operators that CUDA has and the host has not -------------------------------------------------------------------

Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {  // of integers too
  at::AutoDispatchBelowADInplaceOrView below;
  tell("launch", "aten::histc");
  return on_device(on_host(self).to(at::kFloat).histc(bins, low, high).to(self.scalar_type()), self.device());
}

Tensor conv_depthwise2d(const Tensor& self, const Tensor& weight, at::IntArrayRef, const OptionalTensor& bias,
                        at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation) {
  at::AutoDispatchBelowADInplaceOrView below;
  tell("launch", "aten::_conv_depthwise2d");
  const OptionalTensor added = bias ? OptionalTensor(on_host(*bias)) : std::nullopt;
  const auto out = at::conv2d(on_host(self), on_host(weight), added, stride, padding, dilation, self.size(1));
  return on_device(out.contiguous(), self.device());
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("view", &at::native::view);
  m.impl("unfold", &at::native::unfold);
  m.impl("copy_", &copy_);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_empty);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("_scaled_dot_product_efficient_attention", &attention);
  m.impl("_scaled_dot_product_efficient_attention_backward", &attention_backward);
  m.impl("_fused_rms_norm", &rms_norm);
  m.impl("_fused_rms_norm_backward", &rms_norm_backward);
  m.impl("histc", &histc);
  m.impl("_conv_depthwise2d", &conv_depthwise2d);
}

PYBIND11_MODULE(pretended_cuda_kernels, m) {
  m.def("start", [](int count, const std::vector<std::string>& operators) {
    devices = static_cast<DeviceIndex>(count);
    number_takers.insert(operators.begin(), operators.end());
    c10::SetAllocator(CUDA, &device_memory, 1);
    c10::impl::DeviceGuardImplRegistrar(CUDA, new Guard());
    // ATen keeps the hooks that it found at its first question, which `import torch` asks: they are written over
    static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
    new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
    // `_foreach_` operators are composite on the host, and one launch on a GPU; the dispatcher warns of the second kernel
    struct Quiet final : c10::WarningHandler {
      void process(const c10::Warning&) override {}
    } quiet;
    const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    static torch::Library foreach(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames())
      if (name.name.rfind("aten::_foreach_", 0) == 0)
        foreach.impl(c10::toString(name).substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  });
  m.def("listen", [](pybind11::object function) {
    listening = false;
    listener = function.is_none() ? nullptr : function.release().ptr();
    listening = listener != nullptr;
  });
  m.def("wait", &wait, pybind11::arg("op"), pybind11::arg("kind") = "sync");
  m.def("settle", &settle);
  m.def("copies", [] { return copies_asked; });
  m.def("generator", [](int index) { return default_generator(static_cast<DeviceIndex>(index)); });
  m.def("device", [] { return static_cast<int>(current); });
  m.def("set_device", [](int index) { return static_cast<int>(std::exchange(current, static_cast<DeviceIndex>(index))); });
  m.def("memory", [] { return std::make_pair(allocated, peak); });
  m.def("forget_peak", [] { peak = allocated; });
}
