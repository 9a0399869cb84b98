// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"testing"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/diagnose/doctor"
)

// Capabilities and the kernel's types are kept until the self-test has ended.
func TestSelfTestIsPartOfTheStart(t *testing.T) {
	a := &Agent{cfg: config.Agent{SelfTest: true}}
	if a.attached() {
		t.Error("all is attached before the self-test has ended")
	}
	a.selfTested.Store(&doctor.SelfTest{Error: "failed"})
	if !a.attached() {
		t.Error("a self-test that has failed is waited for")
	}
}
