#include "attributes.h"

#include <algorithm>
#include <cstring>

#include "refusal.h"

namespace lt {

namespace {

const Attribute* find(std::span<const Attribute> known, unsigned id) {
    auto found = std::find_if(known.begin(), known.end(), [id](const Attribute& known) { return known.id == id; });
    return found == known.end() ? nullptr : &*found;
}

} // namespace

cublasStatus_t set_attribute(std::span<const Attribute> known, void* object, unsigned id, const void* value,
                             std::size_t bytes) {
    const Attribute* attribute = find(known, id);
    if (!attribute) return refuse(CUBLAS_STATUS_INVALID_VALUE, "attribute %u is not known", id);
    if (attribute->read_only) return refuse(CUBLAS_STATUS_INVALID_VALUE, "attribute %u can only be read", id);
    if (!value || bytes != attribute->bytes)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "attribute %u has %zu bytes, not %zu at %p", id, attribute->bytes,
                      bytes, value);
    std::memcpy(static_cast<char*>(object) + attribute->offset, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t get_attribute(std::span<const Attribute> known, const void* object, unsigned id, void* value,
                             std::size_t bytes, std::size_t* written) {
    const Attribute* attribute = find(known, id);
    if (!attribute) return refuse(CUBLAS_STATUS_INVALID_VALUE, "attribute %u is not known", id);
    return give(static_cast<const char*>(object) + attribute->offset, attribute->bytes, value, bytes, written);
}

cublasStatus_t give(const void* source, std::size_t bytes_wanted, void* value, std::size_t bytes,
                    std::size_t* written) {
    if (bytes == 0) {
        if (!written) return refuse(CUBLAS_STATUS_INVALID_VALUE, "asked for a size, with nowhere to put it");
        *written = bytes_wanted;
        return CUBLAS_STATUS_SUCCESS;
    }
    if (!value || bytes != bytes_wanted)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "the attribute has %zu bytes, not %zu at %p", bytes_wanted, bytes,
                      value);
    std::memcpy(value, source, bytes_wanted);
    if (written) *written = bytes_wanted;
    return CUBLAS_STATUS_SUCCESS;
}

} // namespace lt
