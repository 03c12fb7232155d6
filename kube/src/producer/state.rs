//! What the agent reports.

use wharf_feed::v1;

use super::table::Subject;

/// A row that is not in force as it was sent.
#[derive(Debug, Clone, PartialEq)]
pub struct Refused {
    /// The agent's message.
    pub row: v1::RefusedRow,
    /// Object of a policy.
    pub subject: Option<Subject>,
}

/// State of the agent; by default there is no stream.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AgentState {
    /// The last report of the stream.
    pub report: Option<v1::Report>,
    /// Every row of the first snapshot of the stream is in force.
    pub is_in_force: bool,
    /// Rows that are not in force.
    pub refused: Vec<Refused>,
}

impl AgentState {
    /// The agent has every row, and has reported.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.is_in_force && self.report.is_some()
    }

    /// A condition of the report, with the message of one that does not hold. An absent condition does not hold.
    ///
    /// # Errors
    /// It does not hold.
    pub fn condition(&self, name: &str) -> Result<(), String> {
        let conditions = self.report.iter().flat_map(|report| &report.conditions);
        match conditions.into_iter().find(|condition| condition.name == name) {
            Some(condition) if condition.holds => Ok(()),
            Some(condition) if !condition.message.is_empty() => Err(condition.message.clone()),
            Some(_) => Err(format!("the agent reports that {name} does not hold")),
            None => Err(format!("the agent does not report {name}")),
        }
    }
}
