! A model in Fortran, through the C interfaces of soa_load.h and soa_runner.h.
!
!   score_matrix BUNDLE N FEATURES OUTPUTS
!
! The model has one block of FEATURES float32 columns and one of OUTPUTS, each in one buffer, as most have. Such a
! buffer is an array of Fortran: one column of the model is one column x(:, j), padded to whole 128 bytes.
! Element x(i, j) is 1 + mod(7 (i - 1) + 13 (j - 1), 101) / 101; the outputs are printed as their bits. Test mode.
module soa
  use, intrinsic :: iso_c_binding
  implicit none

  type, bind(c) :: soa_loading
    integer(c_int32_t) :: test = 0, threads = 0, instances = 0
    type(c_ptr) :: device = c_null_ptr, target = c_null_ptr, engine = c_null_ptr
    type(c_ptr) :: digest = c_null_ptr, trusted_keys = c_null_ptr
  end type

  type, bind(c) :: soa_tensor
    type(c_ptr) :: data = c_null_ptr, dtype = c_null_ptr
    integer(c_int32_t) :: ndim = 2
    integer(c_int64_t) :: sizes(2) = 0
  end type

  interface
    integer(c_int) function soa_load(folder, loading, model, origin, message, size) bind(c)
      import
      character(kind=c_char), intent(in) :: folder(*)
      type(soa_loading), intent(in) :: loading
      type(c_ptr), intent(out) :: model, origin
      character(kind=c_char), intent(out) :: message(*)
      integer(c_size_t), value :: size
    end function
    integer(c_int) function soa_call_create(model, arguments, count, call, message, size) bind(c)
      import
      type(c_ptr), value :: model
      type(soa_tensor), intent(in) :: arguments(*)
      integer(c_size_t), value :: count, size
      type(c_ptr), intent(out) :: call
      character(kind=c_char), intent(out) :: message(*)
    end function
    integer(c_int) function soa_call_run(call, stream, message, size) bind(c)
      import
      type(c_ptr), value :: call, stream
      character(kind=c_char), intent(out) :: message(*)
      integer(c_size_t), value :: size
    end function
    subroutine soa_call_delete(call) bind(c)
      import
      type(c_ptr), value :: call
    end subroutine
    subroutine soa_model_close(model) bind(c)
      import
      type(c_ptr), value :: model
    end subroutine
    subroutine exit_program(code) bind(c, name='exit')
      import
      integer(c_int), value :: code
    end subroutine
    subroutine soa_origin_delete(origin) bind(c)
      import
      type(c_ptr), value :: origin
    end subroutine
  end interface

  character(kind=c_char), target :: message(1024)
  character(kind=c_char), target :: float32(8) = ['f', 'l', 'o', 'a', 't', '3', '2', c_null_char]

contains

  subroutine check(code)
    integer(c_int), intent(in) :: code
    integer :: i
    if (code == 0) return
    write (0, '(1000a)') 'score_matrix: ', (message(i), i = 1, minloc(abs(ichar(message)), 1) - 1)
    call exit_program(1_c_int)
  end subroutine

  type(soa_tensor) function matrix(values)
    real(c_float), target, intent(in) :: values(:, :)
    matrix%data = c_loc(values(1, 1))
    matrix%dtype = c_loc(float32)
    matrix%sizes = [size(values, 2, c_int64_t), size(values, 1, c_int64_t)]
  end function
end module

program score_matrix
  use soa
  implicit none
  character(1024) :: folder, text
  integer :: n, features, outputs, padded, i, j
  real(c_float), pointer, contiguous :: x(:, :), y(:, :)
  type(soa_loading) :: loading
  type(soa_tensor) :: arguments(3)
  type(c_ptr) :: model, origin, call

  call get_command_argument(1, folder)
  call get_command_argument(2, text); read (text, *) n
  call get_command_argument(3, text); read (text, *) features
  call get_command_argument(4, text); read (text, *) outputs
  padded = (n + 31)/32*32
  x => aligned(padded, features)
  y => aligned(padded, outputs)
  do j = 1, features
    do i = 1, n
      x(i, j) = real(mod(7*(i - 1) + 13*(j - 1), 101), c_float)/101 + 1
    end do
  end do

  loading%test = 1
  call check(soa_load(trim(folder)//c_null_char, loading, model, origin, message, size(message, kind=c_size_t)))
  arguments(1)%dtype = c_loc(float32)
  arguments(1)%sizes = [int(n, c_int64_t), 0_c_int64_t]  ! the row count
  arguments(2) = matrix(x)
  arguments(3) = matrix(y)
  call check(soa_call_create(model, arguments, 3_c_size_t, call, message, size(message, kind=c_size_t)))
  call check(soa_call_run(call, c_null_ptr, message, size(message, kind=c_size_t)))
  do j = 1, outputs
    do i = 1, n
      write (*, '(i0, 1x, i0, 1x, z8.8)') j - 1, i - 1, transfer(y(i, j), 0_c_int32_t)
    end do
  end do
  call soa_call_delete(call)
  call soa_model_close(model)
  call soa_origin_delete(origin)

contains

  ! Zeroed memory whose first element is at a multiple of 128 bytes; kept for the program's life.
  function aligned(rows, columns) result(found)
    integer, intent(in) :: rows, columns
    real(c_float), pointer, contiguous :: found(:, :), memory(:)
    integer :: skip
    allocate (memory(rows*columns + 32))
    memory = 0
    skip = int(modulo(-transfer(c_loc(memory(1)), 0_c_intptr_t), 128_c_intptr_t)/4)
    found(1:rows, 1:columns) => memory(skip + 1:skip + rows*columns)
  end function
end program
