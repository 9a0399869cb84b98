// SPDX-License-Identifier: Apache-2.0

//go:build linux

package kernels

import "testing"

func TestFentryOfArm64(t *testing.T) {
	for _, tt := range []struct {
		arch, release, method string
		want                  bool
	}{
		{"amd64", "6.1.0-56-cloud-amd64", "fentry", true},
		{"arm64", "6.1.0-56-cloud-arm64", "fentry", false},
		{"arm64", "6.1.0-56-cloud-arm64", "kprobe", true},
		{"arm64", "6.12.117+deb12-cloud-arm64", "fentry", true},
		{"arm64", "7.2.13+deb14-cloud-arm64", "fentry", true},
	} {
		if got := has(tt.arch, tt.release, tt.method); got != tt.want {
			t.Errorf("%+v: %v", tt, got)
		}
	}
}

func TestOutsideNothingIsCertain(t *testing.T) {
	t.Setenv(Variable, "")
	if Must("fentry") || Best("fentry", "kprobe") != "fentry" {
		t.Error("a method is expected outside test/vm")
	}
}
