//! Mistakes that can be planted into the core, to prove that its simulation finds them. Outside of tests none ever is,
//! and asking costs nothing.

/// A mistake that somebody could have made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bug {
    /// A holder leaves a shared page and is still counted.
    KeepsReference,
    /// A holder leaves a shared page and is counted out twice.
    ReleasesTwice,
    /// A page can be had while a step may still touch it.
    SkipsQuarantine,
    /// Quarantine ends one step early.
    QuarantineEndsEarly,
    /// A page that is taken from the cache stays in the list of those to be evicted.
    EvictsHeldPages,
    /// A page is named when it is begun, not when it is full.
    NamesPagesBegun,
    /// Names of blocks know nothing of what comes before.
    LeavesParentOut,
    /// Names of blocks know nothing of the salt.
    LeavesSaltOut,
    /// All of a prompt may be found, and no row is left to draw from.
    FindsLastToken,
    /// A prefix is taken over that one group alone has.
    FindsInOneGroup,
    /// Names outlive the group that computed the pages.
    KeepsNamesOfLostGroup,
    /// Pages are given up while the next row still sees them.
    WindowTooEarly,
    /// Pages are kept one token too long.
    WindowTooLate,
    /// Choices write to the page in which their prompt ends.
    SharesWrittenPage,
    /// What is copied may be handed out before it is copied.
    CopiesWithoutHolding,
    /// Whoever is cancelled while it waits for another one's pages keeps its own.
    LeaksWhenPromised,
    /// Who waits for another one's pages does so for ever.
    WaitsForNobody,
    /// Decodes cost nothing of the budget.
    OverrunsBudget,
    /// Decodes wait until no prompt is left.
    DecodesLast,
    /// The shortest prompts first, whoever came first.
    StarvesLongPrompts,
    /// After a preemption shards are not told to begin anew.
    ForgetsToBegin,
    /// The first in the order gives way.
    PreemptsFirst,
    /// Preemptions are not counted.
    ForgetsPreemptions,
    /// Whoever was preempted four times gives way once more.
    PreemptsTheKept,
    /// The last of the queue is admitted.
    AdmitsLast,
    /// Priorities say nothing.
    IgnoresPriority,
    /// A higher priority number comes first.
    TurnsPriorityRound,
    /// What an earlier life drew is taken for this one's.
    TakesEarlierLives,
    /// Tokens in flight do not count towards the limit.
    OverrunsLimit,
    /// A replay reports log-probabilities of the prompt again.
    ReportsTwice,
    /// A prompt waits for pages on their way, whoever takes them.
    IsPatientForEver,
    /// What is ordered is taken for done, whatever shards have reported.
    TakesTransfersForDone,
    /// Whoever's pages are on their way from the host runs before they are there.
    RunsBeforeLoaded,
    /// The first of a prefix's pages to arrive names all of them.
    NamesPagesOnTheirWay,
    /// A page of the host can be had while a transfer reads it.
    EvictsHostPagesThatAreRead,
    /// A page can be had while it is being saved.
    GivesAwaySavedPages,
    /// Loads that nobody waits for any more keep their pages of the host.
    LeaksHostPages,
    /// The host's pages outlive the group that saved them.
    KeepsHostOfLostGroup,
    /// Whoever awaits its tokens is planned without them.
    AwaitsNothing,
}

#[cfg(test)]
impl Bug {
    /// Those that show in many scenarios: all but `IsPatientForEver`.
    pub(super) const ALL: &[Bug] = &[
        Bug::KeepsReference,
        Bug::ReleasesTwice,
        Bug::SkipsQuarantine,
        Bug::QuarantineEndsEarly,
        Bug::EvictsHeldPages,
        Bug::NamesPagesBegun,
        Bug::LeavesParentOut,
        Bug::LeavesSaltOut,
        Bug::FindsLastToken,
        Bug::FindsInOneGroup,
        Bug::KeepsNamesOfLostGroup,
        Bug::WindowTooEarly,
        Bug::WindowTooLate,
        Bug::SharesWrittenPage,
        Bug::CopiesWithoutHolding,
        Bug::LeaksWhenPromised,
        Bug::WaitsForNobody,
        Bug::OverrunsBudget,
        Bug::DecodesLast,
        Bug::StarvesLongPrompts,
        Bug::ForgetsToBegin,
        Bug::PreemptsFirst,
        Bug::ForgetsPreemptions,
        Bug::PreemptsTheKept,
        Bug::AdmitsLast,
        Bug::IgnoresPriority,
        Bug::TurnsPriorityRound,
        Bug::TakesEarlierLives,
        Bug::OverrunsLimit,
        Bug::ReportsTwice,
        Bug::TakesTransfersForDone,
        Bug::RunsBeforeLoaded,
        Bug::NamesPagesOnTheirWay,
        Bug::EvictsHostPagesThatAreRead,
        Bug::GivesAwaySavedPages,
        Bug::LeaksHostPages,
        Bug::KeepsHostOfLostGroup,
        Bug::AwaitsNothing,
    ];
}

#[cfg(test)]
std::thread_local! {
    static PLANTED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Whether this thread's schedulers have this mistake.
#[cfg(test)]
pub(super) fn planted(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}

/// Never.
#[cfg(not(test))]
pub(super) const fn planted(_: Bug) -> bool {
    false
}

/// Plants a mistake into this thread's schedulers, instead of what was planted before.
#[cfg(test)]
pub(super) fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}
