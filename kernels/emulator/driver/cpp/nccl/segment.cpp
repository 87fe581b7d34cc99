#include "segment.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace nccl {

std::shared_ptr<Segment> Segment::open(const std::string& name, std::string& reason) {
    auto refused = [&](const char* call) {
        reason = std::string(call) + " of " + name + ": " + std::strerror(errno);
        return nullptr;
    };
    int file = shm_open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) return refused("shm_open");
    // The first makes it so large, for the others it is already.
    if (ftruncate(file, sizeof(Shared)) != 0) {
        close(file);
        return refused("ftruncate");
    }
    void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return refused("mmap");
    return std::shared_ptr<Segment>(new Segment(name, static_cast<Shared*>(memory)));
}

Segment::~Segment() { munmap(shared, sizeof(Shared)); }

// Every rank says so; the first one is heard.
void Segment::forget_name() { shm_unlink(name.c_str()); }

} // namespace nccl
