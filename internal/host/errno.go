// SPDX-License-Identifier: Apache-2.0

package host

// listenError says what kind of error a listen gave.
type listenError uint8

const (
	otherError listenError = iota
	inUse                  // somebody holds the address
	forbidden              // the system does not let us
	noAddress              // the address is not of this machine
)
