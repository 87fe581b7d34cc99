#include "work.h"

namespace software {

namespace {

class SimpleExecution : public Execution {
public:
    explicit SimpleExecution(const std::function<void()>& body) : body(body) {}

    Outcome step() override {
        body();
        return {Outcome::Done};
    }

private:
    const std::function<void()>& body;
};

} // namespace

std::unique_ptr<Execution> SimpleWork::begin(Timed&) const { return std::make_unique<SimpleExecution>(body); }

} // namespace software
